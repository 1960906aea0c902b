"""A Llama with native sparse attention (NSA, arXiv 2502.11089), in which several tokens in a row can share a selection.

Each layer attends in three branches with keys and values of their own, and sums their outputs by gates (equation 5):

    compressed   one learned key and value for each full block of earlier tokens (equation 7)
    selected     the tokens of the blocks whose compressed keys get most weight from the query's group (8 to 12)
    window       the newest tokens

Compression and selection use the same blocks, so equation 9 leaves the scores unchanged. In a run of `shared` tokens
all tokens read the blocks that the first one selects, in training as well. MatX's "Speculative Decoding with Blockwise
Sparse Attention" (2025) proposes this for the k + 1 tokens of a round; `shared` is its k + 1.

The attention masks what a query does not read, so its speed says nothing. No service runs these models.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specahead.models import NATIVE_SPARSE

BRANCHES = 3  # compressed, selected, window
START_GATES = -2.0, 1.5, -2.0  # biases of a model that starts from a dense one: gates of 0.12, 0.82 and 0.12
_WEIGHTS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


@dataclass(frozen=True)
class SparseRule:
    """Which tokens a query reads."""

    block_size: int = 16
    """Tokens of a block."""
    top: int = 8
    """Blocks that a query selects, `first` and `local` included."""
    first: int = 1
    """Blocks at the beginning of the text that every query selects."""
    local: int = 2
    """Newest blocks that every query selects; its own block is the last of them."""
    window: int = 64
    """Newest tokens that the window holds, the query's own included."""

    def __post_init__(self) -> None:
        if self.local < 1 or self.top < self.first + self.local:
            raise ValueError(f"{self}: expected local of at least 1, and top of at least first + local")

    @classmethod
    def parse(cls, text: str) -> "SparseRule":
        """Read "block_size,top,first,local,window"."""
        return cls(*map(int, text.split(",")))

    @property
    def dense_below(self) -> int:
        """Tokens of the longest text of which every block is selected."""
        return self.top * self.block_size


class Compression(nn.Module):
    """Maps each full block to one vector: a weighted sum over its tokens, then a linear map. It begins as the mean."""

    def __init__(self, block_size: int, dim: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(block_size, dim))
        self.weights = nn.Parameter(torch.full((block_size,), 1 / block_size))
        self.map = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.map.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, heads, full blocks, dim] for x [rows, heads, tokens, dim]."""
        size = len(self.weights)
        blocks = x[:, :, : x.shape[2] // size * size].unflatten(2, (-1, size)) + self.positions
        return self.map(torch.einsum("rhbsd,s->rhbd", blocks, self.weights.to(blocks.dtype)))


class NativeSparseAttention(nn.Module):
    """Replaces LlamaAttention."""

    def __init__(self, config: LlamaConfig, rule: SparseRule) -> None:
        super().__init__()
        self.rule, self.dim, hidden = rule, config.head_dim, config.hidden_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, BRANCHES * self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, BRANCHES * self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.gates = nn.Linear(hidden, BRANCHES * self.heads)
        self.compress_keys = Compression(rule.block_size, self.dim)
        self.compress_values = Compression(rule.block_size, self.dim)
        self.selected: Tensor | None = None  # what the runs of the last text selected, as `select_blocks` returns it

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], shared: int, **_: Any
    ) -> tuple[Tensor, None]:
        """Return the output [rows, tokens, hidden], and None in place of weights.

        hidden_states: [rows, tokens, hidden]. position_embeddings: cosines and sines, each [1, tokens, head_dim].
        shared: tokens of a run, which read the blocks that its first token selects; 0: every query selects all blocks.
        """
        rows, tokens, _hidden = hidden_states.shape

        def heads(x: Tensor) -> Tensor:
            return x.view(rows, tokens, -1, self.dim).transpose(1, 2)

        keys, values = heads(self.k_proj(hidden_states)), heads(self.v_proj(hidden_states))
        queries, keys = apply_rotary_pos_emb(heads(self.q_proj(hidden_states)), keys, *position_embeddings)
        (kc, ks, kw), (vc, vs, vw) = keys.chunk(BRANCHES, 1), values.chunk(BRANCHES, 1)
        compressed, weights = self._attend_compressed(queries, self.compress_keys(kc), self.compress_values(vc))
        position = torch.arange(tokens, device=queries.device)
        back = position[:, None] - position
        selection = back >= 0
        if shared:
            self.selected = select_blocks(weights.detach(), self.rule, shared)
            of_tokens = self.selected.repeat_interleave(shared, 2)[:, :, :tokens]
            of_kv_heads = of_tokens.repeat_interleave(self.rule.block_size, 3)[..., :tokens].tril()
            selection = of_kv_heads.repeat_interleave(self.heads // self.kv_heads, 1)
        selected = F.scaled_dot_product_attention(queries, ks, vs, attn_mask=selection, enable_gqa=True)
        near = (back >= 0) & (back < self.rule.window)
        window = F.scaled_dot_product_attention(queries, kw, vw, attn_mask=near, enable_gqa=True)
        gates = self.gates(hidden_states).sigmoid().view(rows, tokens, BRANCHES, self.heads).permute(2, 0, 3, 1)
        outputs = torch.stack((compressed, selected, window))
        return self.o_proj((gates[..., None] * outputs).sum(0).transpose(1, 2).flatten(2)), None

    def _attend_compressed(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [rows, heads, tokens, dim], and the weights of blocks [rows, kv heads, tokens, blocks].

        The query heads of a KV head select together, so its weights are the sum over them (equation 10).
        A query reads the blocks that end at it or before it. If no block has ended, its output is zero.
        """
        grouped = queries.unflatten(1, (self.kv_heads, -1))
        last = torch.arange(1, keys.shape[2] + 1, device=keys.device) * self.rule.block_size - 1
        seen = torch.arange(queries.shape[2], device=keys.device)[:, None] >= last
        scores = torch.einsum("rhgtd,rhbd->rhgtb", grouped, keys) * self.dim**-0.5
        weights = scores.float().masked_fill(~seen, -1e9).softmax(-1) * seen
        output = torch.einsum("rhgtb,rhbd->rhgtd", weights.to(values.dtype), values)
        return output.flatten(1, 2), weights.sum(2)


def select_blocks(weights: Tensor, rule: SparseRule, shared: int) -> Tensor:
    """Return which blocks the first token of each run selects for the run, [rows, kv heads, runs, blocks] bool.

    weights: [rows, kv heads, tokens, full blocks] float32, those that each query gives to compressed keys.
    shared: tokens of a run.
    """
    tokens, size = weights.shape[2], rule.block_size
    scores = F.pad(weights[:, :, ::shared], (0, -(-tokens // size) - weights.shape[-1]))
    block = torch.arange(scores.shape[-1], device=weights.device)
    own = torch.arange(0, tokens, shared, device=weights.device)[:, None] // size
    always = (block < rule.first) | (block > own - rule.local)
    scores = scores.masked_fill(always, torch.inf).masked_fill(block > own, -1.0)
    best = scores.topk(min(rule.top, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (block <= own)


class NativeSparseLlama(nn.Module):
    """A Llama with NativeSparseAttention in all layers, with random weights at first."""

    def __init__(self, config: LlamaConfig, rule: SparseRule) -> None:
        super().__init__()
        self.rule, self.llama = rule, LlamaForCausalLM(config)
        for layer in self.llama.model.layers:
            layer.self_attn = NativeSparseAttention(config, rule)

    def forward(self, ids: Tensor, shared: int) -> Tensor:
        """Return logits [rows, tokens, vocab] for ids [rows, tokens] int64. shared: as for NativeSparseAttention."""
        logits: Tensor = self.llama(ids, shared=shared, use_cache=False).logits
        return logits

    def selected(self) -> list[Tensor]:
        """Return what the last text's runs selected, for each layer, as `select_blocks` returns it."""
        return [layer.self_attn.selected for layer in self.llama.model.layers]

    @classmethod
    def from_dense(cls, dense: LlamaForCausalLM, rule: SparseRule) -> "NativeSparseLlama":
        """Return a model with the weights of a Llama. Each branch gets the Llama's keys and values; see START_GATES."""
        model = cls(dense.config, rule)
        weights = dict(dense.state_dict())
        for name in list(weights):
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                weights[name] = weights[name].repeat(BRANCHES, 1)
        model.llama.load_state_dict(weights, strict=False)  # a Llama has neither compression nor gates
        model.open_gates(START_GATES)
        return model

    @torch.no_grad()
    def open_gates(self, biases: tuple[float, float, float]) -> None:
        """Set the gates of all heads and tokens to the sigmoids of three numbers, one for each branch."""
        for layer in self.llama.model.layers:
            gates = layer.self_attn.gates
            nn.init.zeros_(gates.weight)
            gates.bias.copy_(torch.tensor(biases).repeat_interleave(len(gates.bias) // BRANCHES))

    def save(self, folder: Path, tokenizer: Path) -> None:
        """Write the weights, the config, and a copy of a tokenizer.json to a folder, for `load_native_sparse`."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": NATIVE_SPARSE, "rule": asdict(self.rule), "llama": self.llama.config.to_dict()}
        (folder / _CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
        save_model(self.llama, str(folder / _WEIGHTS))
        shutil.copyfile(tokenizer, folder / _TOKENIZER)


def is_native_sparse(folder: str) -> bool:
    """Return whether NativeSparseLlama.save wrote a folder."""
    config = Path(folder) / _CONFIG
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == NATIVE_SPARSE


def load_native_sparse(folder: str, device: str) -> tuple[NativeSparseLlama, PreTrainedTokenizerFast]:
    """Return a saved model in float32, and its tokenizer."""
    config = json.loads((Path(folder) / _CONFIG).read_text(encoding="utf-8"))
    model = NativeSparseLlama(LlamaConfig.from_dict(config["llama"]), SparseRule(**config["rule"]))
    load_model(model.llama, Path(folder) / _WEIGHTS)
    return model.eval().to(device), PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / _TOKENIZER))
