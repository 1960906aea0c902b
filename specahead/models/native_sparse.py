"""A Llama whose attention is native sparse attention (NSA, arXiv 2502.11089), in which runs of tokens can share blocks.

Each layer attends in three ways, each with its own keys and values, and weighs their outputs by gates (equation 5):

    compressed   one learned key and value for each full block of the past (equation 7)
    selected     the tokens of those blocks whose compressed keys the query's group weighs most (equations 8 to 12)
    window       the newest tokens

Blocks of compression are those of selection, where equation 9 leaves the scores as they are. `shared` tokens in a row
read the blocks that the first one of them selects, and learn to: this is what MatX's "Speculative Decoding with
Blockwise Sparse Attention" (2025) proposes, whose k drafted tokens are shared - 1.

What is not read is masked, so that no speed can be measured here. The services do not run these models.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specahead.models import NATIVE_SPARSE
from specahead.models.pair import Shape, llama

BRANCHES = 3  # compressed, selected, window
_WEIGHTS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


@dataclass(frozen=True)
class SparseRule:
    """What a query reads."""

    block_size: int = 16
    """Tokens of a block."""
    top: int = 8
    """Blocks that a query selects, the following ones among them."""
    first: int = 1
    """Blocks at the beginning that it reads in any case."""
    local: int = 2
    """Newest blocks that it reads in any case; its own is the last of them."""
    window: int = 64
    """Newest tokens that the window holds, the query's own among them."""

    def __post_init__(self) -> None:
        if self.local < 1 or self.top < self.first + self.local:
            raise ValueError(f"{self}: local must be 1 or more, and top at least first + local")

    @classmethod
    def parse(cls, text: str) -> "SparseRule":
        """From "block_size,top,first,local,window"."""
        block_size, top, first, local, window = map(int, text.split(","))
        return cls(block_size, top, first, local, window)

    @property
    def reach(self) -> int:
        """Tokens up to which every block is selected."""
        return self.top * self.block_size


class Compression(nn.Module):
    """One vector for each block: weighted by place, then mapped (equation 7). It begins as the mean."""

    def __init__(self, block_size: int, dim: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(block_size, dim))
        self.weights = nn.Parameter(torch.full((block_size,), 1 / block_size))
        self.map = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.map.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, heads, full blocks, dim] for x [rows, heads, tokens, dim]."""
        size = len(self.weights)
        blocks = x[:, :, : x.shape[2] // size * size].unflatten(2, (-1, size)) + self.places
        return self.map(torch.einsum("rhbsd,s->rhbd", blocks, self.weights.to(blocks.dtype)))


class NativeSparseAttention(nn.Module):
    """Stands where LlamaAttention does."""

    def __init__(self, shape: Shape, rule: SparseRule) -> None:
        super().__init__()
        self.rule, self.heads, self.kv_heads, self.dim = rule, shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, BRANCHES * shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, BRANCHES * shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.gates = nn.Linear(shape.hidden, BRANCHES * shape.heads)
        self.compress_keys = Compression(rule.block_size, shape.head_dim)
        self.compress_values = Compression(rule.block_size, shape.head_dim)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], shared: int, **_: Any
    ) -> tuple[Tensor, None]:
        """Return the output [rows, tokens, hidden] and no weights.

        hidden_states: [rows, tokens, hidden]. position_embeddings: cosines and sines, each [1, tokens, head_dim].
        shared: tokens in a row that read the blocks which the first one selects; 0: all blocks are selected.
        """
        rows, tokens, _hidden = hidden_states.shape

        def heads(x: Tensor) -> Tensor:
            return x.view(rows, tokens, -1, self.dim).transpose(1, 2)

        keys, values = heads(self.k_proj(hidden_states)), heads(self.v_proj(hidden_states))
        queries, keys = apply_rotary_pos_emb(heads(self.q_proj(hidden_states)), keys, *position_embeddings)
        (kc, ks, kw), (vc, vs, vw) = keys.chunk(BRANCHES, 1), values.chunk(BRANCHES, 1)
        compressed, weights = self._attend_compressed(queries, self.compress_keys(kc), self.compress_values(vc))
        rule, run = (self.rule, shared) if shared else (replace(self.rule, top=tokens), 1)
        selection = select_blocks(weights.detach(), tokens, rule, run)
        chosen = read_by(selection, tokens, rule, run).repeat_interleave(self.heads // self.kv_heads, 1)
        selected = F.scaled_dot_product_attention(queries, ks, vs, attn_mask=chosen, enable_gqa=True)
        outputs = compressed, selected, self._attend_window(queries, kw, vw)
        gates = self.gates(hidden_states).sigmoid().view(rows, tokens, BRANCHES, self.heads).permute(2, 0, 3, 1)
        mixed = sum(gate[..., None] * output for gate, output in zip(gates, outputs, strict=True))
        assert isinstance(mixed, Tensor)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None

    def _attend_compressed(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [rows, heads, tokens, dim], and the weights of blocks [rows, kv heads, tokens, blocks].

        The weights of a KV head are those of all its query heads (equation 10): they select together.
        A query sees the blocks that end at it or before it; where none has ended, it reads nothing.
        """
        grouped = queries.unflatten(1, (self.kv_heads, -1))
        last = torch.arange(1, keys.shape[2] + 1, device=keys.device) * self.rule.block_size - 1
        seen = torch.arange(queries.shape[2], device=keys.device)[:, None] >= last
        scores = torch.einsum("rhgtd,rhbd->rhgtb", grouped, keys) * self.dim**-0.5
        weights = scores.float().masked_fill(~seen, -1e9).softmax(-1) * seen
        output = torch.einsum("rhgtb,rhbd->rhgtd", weights.to(values.dtype), values)
        return output.flatten(1, 2), weights.sum(2)

    def _attend_window(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the output [rows, heads, tokens, dim]: chunks as long as a window read themselves and those before."""
        size, tokens, group = self.rule.window, queries.shape[2], self.heads // self.kv_heads
        missing = -tokens % size
        chunks = F.pad(queries, (0, 0, 0, missing)).flatten(0, 1).unflatten(1, (-1, size))
        padded = (F.pad(x, (0, 0, size, missing)).repeat_interleave(group, 1).flatten(0, 1) for x in (keys, values))
        keys, values = (x.unfold(1, 2 * size, size).transpose(2, 3) for x in padded)
        within, chunk = torch.arange(2 * size, device=keys.device), torch.arange(chunks.shape[1], device=keys.device)
        back, is_token = within[size:, None] - within, chunk[:, None, None] * size + within >= size
        read = (back >= 0) & (back < size) & is_token  # the first chunk is padded in front
        output = F.scaled_dot_product_attention(chunks, keys, values, attn_mask=read)
        return output.flatten(1, 2)[:, :tokens].unflatten(0, (-1, self.heads))


def select_blocks(weights: Tensor, tokens: int, rule: SparseRule, shared: int) -> Tensor:
    """Return the blocks that the first token of each run selects, [rows, kv heads, runs, blocks] bool.

    weights: [rows, kv heads, tokens, full blocks] float. shared: tokens of a run.
    """
    scores = F.pad(weights[:, :, ::shared].float(), (0, -(-tokens // rule.block_size) - weights.shape[-1]))
    block = torch.arange(scores.shape[-1], device=weights.device)
    own = torch.arange(0, tokens, shared, device=weights.device)[:, None] // rule.block_size
    kept = (block < rule.first) | (block > own - rule.local)
    scores = scores.masked_fill(kept, torch.inf).masked_fill(block > own, -1.0)
    best = scores.topk(min(rule.top, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (block <= own)


def read_by(selection: Tensor, tokens: int, rule: SparseRule, shared: int) -> Tensor:
    """Return whether a query reads a token: those of its run's blocks, but for later ones.

    selection: as `select_blocks` returns it. Returns [rows, kv heads, queries, tokens] bool.
    """
    of_queries = selection.repeat_interleave(shared, 2)[:, :, :tokens]
    return of_queries.repeat_interleave(rule.block_size, 3)[..., :tokens].tril()


class NativeSparseLlama(nn.Module):
    """A Llama with NativeSparseAttention in all layers."""

    def __init__(self, shape: Shape, rule: SparseRule, vocab: int, end_of_text: int) -> None:
        super().__init__()
        self.shape, self.rule = shape, rule
        self.llama = llama(shape, vocab, end_of_text)
        for layer in self.llama.model.layers:
            layer.self_attn = NativeSparseAttention(shape, rule)

    def forward(self, ids: Tensor, shared: int) -> Tensor:
        """Return logits [rows, tokens, vocab] for ids [rows, tokens] int64. shared: as NativeSparseAttention has it."""
        logits: Tensor = self.llama(ids, shared=shared).logits
        return logits

    def attentions(self) -> Sequence[NativeSparseAttention]:
        return [layer.self_attn for layer in self.llama.model.layers]

    def start_from(self, dense: LlamaForCausalLM) -> None:
        """Take the weights of a Llama of the same shape; each branch gets its keys and values, and selection the lead.

        Raises ValueError for a model of another shape.
        """
        weights = dict(dense.state_dict())
        for name in list(weights):
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                weights[name] = weights[name].repeat(BRANCHES, 1)
        try:
            missing, _ = self.llama.load_state_dict(weights, strict=False)
        except RuntimeError as error:
            raise ValueError(f"weights to start from do not fit {self.shape}: {error}") from None
        assert all("compress" in name or "gates" in name for name in missing)
        for attention in self.attentions():
            nn.init.zeros_(attention.gates.weight)
            with torch.no_grad():  # sigmoids of 0.12, 0.82 and 0.12
                attention.gates.bias.copy_(torch.tensor([-2.0, 1.5, -2.0]).repeat_interleave(self.shape.heads))

    def save(self, folder: Path, tokenizer: Path) -> None:
        """Write weights, sizes and a copy of the tokenizer.json, which `load_native_sparse` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.llama.config
        sizes = {"vocab": config.vocab_size, "end_of_text": config.eos_token_id}
        said = {"model_type": NATIVE_SPARSE, "shape": asdict(self.shape), "rule": asdict(self.rule), **sizes}
        (folder / _CONFIG).write_text(json.dumps(said, indent=1), encoding="utf-8")
        save_model(self.llama, str(folder / _WEIGHTS))
        shutil.copyfile(tokenizer, folder / _TOKENIZER)


def is_native_sparse(folder: str) -> bool:
    """Return whether a folder holds what NativeSparseLlama.save writes."""
    config = Path(folder) / _CONFIG
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == NATIVE_SPARSE


def load_native_sparse(folder: str, device: str) -> tuple[NativeSparseLlama, PreTrainedTokenizerFast]:
    """Return a saved model in float32, and its tokenizer."""
    said = json.loads((Path(folder) / _CONFIG).read_text(encoding="utf-8"))
    model = NativeSparseLlama(Shape(**said["shape"]), SparseRule(**said["rule"]), said["vocab"], said["end_of_text"])
    load_model(model.llama, Path(folder) / _WEIGHTS)
    return model.eval().to(device), PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / _TOKENIZER))
