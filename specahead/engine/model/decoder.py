"""A decoder-only transformer of gated MLPs, or of mixtures of them: its description, and its pass over paged KV.

The description says where norms, biases and scales are applied, so one pass serves all families that engine.families
reads. How many launches a pass takes is up to kernels.linear, which joins linear layers to what stands beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.chosen_blocks import BlockRule
from specahead.kernels.compiling import compiles_only
from specahead.kernels.linear import (
    BLOCK,
    LinearWeight,
    Residual,
    add_linear,
    linear,
    linear_of_residual,
    norm_residual,
)
from specahead.kernels.mixture import Experts, mix_experts
from specahead.kernels.rms_norm import add_rms_norm
from specahead.kernels.rotary import rotate_and_write_kv

# The attention of a layer: (layer, rotated queries [tokens, heads, dim]) -> [tokens, heads, dim].
Attend = Callable[[int, Tensor], Tensor]
# Called with each layer's number and the residual stream that it reads, [tokens, hidden].
Observe = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class PassTokens:
    """The tokens of a pass."""

    ids: Tensor
    """[tokens] int64."""
    positions: Tensor
    """[tokens] int64."""
    slots: Tensor
    """[tokens] int64, page * PAGE_SIZE + offset of each token's KV; a token with a negative slot is not written."""


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of a layer. A norm that is None is left out."""

    input_norm: Tensor | None
    """[hidden], of the stream that attention reads."""
    qkv: LinearWeight
    """The rows of queries, keys and values, below one another: [(heads + 2 * kv_heads) * head_dim, hidden]."""
    out: LinearWeight
    """[hidden, heads * head_dim]."""
    mlp_norm: Tensor | None
    """[hidden], of the stream that the MLP reads."""
    gate_up: LinearWeight | None
    """The rows of gates and ups, below one another: [2 * inner, hidden]; None: the layer has a mixture of experts."""
    down: LinearWeight | None
    """[hidden, inner]; None as gate_up is."""
    experts: Experts | None = None
    """A mixture in place of gate_up and down. It reads the stream after mlp_norm (Qwen3-MoE)."""
    attention_out_norm: Tensor | None = None
    """[hidden], of the output of attention, before it is added to the stream (OLMo-2)."""
    mlp_out_norm: Tensor | None = None
    """[hidden], of the output of the MLP, before it is added to the stream (OLMo-2)."""
    head_norms: Tensor | None = None
    """[2, head_dim], of each head's query and of each head's key (Qwen3)."""
    full_norms: tuple[Tensor, Tensor] | None = None
    """[heads * head_dim] and [kv_heads * head_dim], of all heads' queries together, and of their keys (OLMo-2)."""
    rotates: bool = True
    """Whether queries and keys are rotated by their positions (SmolLM3 leaves some layers out)."""

    @property
    def linears(self) -> tuple[LinearWeight, ...]:
        """All linear layers but those of experts."""
        return tuple(each for each in (self.qkv, self.out, self.gate_up, self.down) if each is not None)


@dataclass(frozen=True)
class Decoder:
    """A model's weights, and the numbers that its layers share."""

    embedding: Tensor
    """[at least vocab, hidden]."""
    layers: list[DecoderLayer]
    norm: Tensor
    """[hidden], of the stream that the head reads."""
    lm_head: LinearWeight
    """[vocab, hidden]."""
    cosines: Tensor
    """[max positions, rotated / 2] float32, scaled as the model scales them; `rotated` dimensions of a head rotate."""
    sines: Tensor
    """Like cosines."""
    heads: int
    """Of this rank."""
    kv_heads: int
    """Of this rank."""
    epsilon: float
    """Of all norms."""
    attention_scale: float
    """The factor of the scores, which are products of queries and keys."""
    embedding_scale: float = 1.0
    """The factor of embeddings (Granite, MiniCPM)."""
    residual_scale: float = 1.0
    """The factor of the outputs of attention and MLP (Granite, MiniCPM)."""
    logits_scale: float = 1.0
    """The factor of logits (Granite, MiniCPM)."""
    block_rule: BlockRule | None = None
    """How the model's own attention chooses the blocks that it reads (MiniCPM4); None: it reads everything."""
    ranks: Ranks = ALONE
    """The ranks that run the model together, each with its own heads and columns of the MLP, or of each expert."""

    can_capture = True  # in CUDA graphs

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def with_vocabulary(self, count: int) -> "Decoder":
        """Return the decoder with the logits of the ids below `count` only."""
        return replace(self, lm_head=LinearWeight(self.lm_head.values[:count]))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads: all but the embedding, of which it reads a few rows."""
        layers = [weight for layer in self.layers for weight in layer.linears]
        of_experts = sum(layer.experts.nbytes for layer in self.layers if layer.experts is not None)
        return sum(weight.values.nbytes for weight in (*layers, self.lm_head)) + of_experts

    def read_share(self, rows: int) -> float:
        """Return the share of these bytes that a pass of so many rows reads, if rows choose experts at random."""
        mixtures = [layer.experts for layer in self.layers if layer.experts is not None]
        unread = sum(each.nbytes * (1 - each.chosen / len(each.router)) ** rows for each in mixtures)
        return 1 - unread / self.weight_bytes

    def with_eight_bit_weights(self) -> "Decoder":
        """Return the decoder with a second copy in 8 bits of its 16-bit weights, which passes of up to 64 rows read.

        Raises NotImplementedError for layers that read the residual stream without a norm, whose numbers float16 might
        not hold, for mixtures of experts, and on a GPU for layers that no kernel takes.
        """
        if any(layer.experts is not None for layer in self.layers):
            raise NotImplementedError("second copies of weights, in 8 bits, are not built for mixtures of experts")
        if any(norm is None for layer in self.layers for norm in (layer.input_norm, layer.mlp_norm)):
            raise NotImplementedError("8-bit weights are built for layers that norm what attention and the MLP read")
        for weight in (weight.values for layer in self.layers for weight in layer.linears if self.embedding.is_cuda):
            if isinstance(weight, Tensor) and (weight.shape[1] % BLOCK or weight.dtype == torch.float32):
                raise NotImplementedError(
                    f"8-bit weights are built for 16-bit layers of a multiple of {BLOCK} inputs, got {weight.shape[1]} "
                    f"of {weight.dtype}"
                )
        layers = [
            replace(
                layer,
                qkv=layer.qkv.with_eight_bit(),
                out=layer.out.with_eight_bit(),
                gate_up=None if layer.gate_up is None else layer.gate_up.with_eight_bit(),
                down=None if layer.down is None else layer.down.with_eight_bit(),
            )
            for layer in self.layers
        ]
        return replace(self, layers=layers, lm_head=self.lm_head.with_eight_bit())

    def run(
        self,
        tokens: PassTokens,
        kv: KVCache,
        attend: Attend,
        logits_rows: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Write the tokens' KV to the pages of `kv`, and return the logits [rows, vocab] of all, or of `logits_rows`.

        logits_rows: [rows] int32 or int64; more rows than tokens are allowed, since each sequence has room for as many.
            After the last layer's attention only these rows run on: of other tokens only keys and values are needed.
        observe: sees the stream before each layer.
        """
        kernels = default_backend(tokens.ids.device)
        stream = self.embed(tokens.ids)
        for index in self._layers_to_run():
            queries, stream = self.before_attention(index, stream, tokens, kv, kernels)
            if observe is not None:
                observe(index, stream.total)
            attended = attend(index, queries).flatten(1)
            if index == self.num_layers - 1 and logits_rows is not None:
                return self.last_logits(stream, attended, logits_rows, kernels)
            stream = self.after_attention(index, stream, attended, kernels)
        return self._logits(stream, kernels)

    # The parts of a pass, in their order.

    def embed(self, token_ids: Tensor) -> Residual:
        """Return the residual stream that the first layer reads. token_ids: [tokens] int64."""
        hidden = F.embedding(token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        return Residual(hidden, scale=self.residual_scale)

    def before_attention(
        self, index: int, stream: Residual, tokens: PassTokens, kv: KVCache, backend: Backend
    ) -> tuple[Tensor, Residual]:
        """Write the tokens' KV of a layer, and return its queries [tokens, heads, dim] and the stream, added up."""
        layer = self.layers[index]
        qkv, stream = self._read(stream, layer.input_norm, layer.qkv, backend, in_parts=layer.full_norms is None)
        return self._rotate(index, qkv, tokens, kv, backend), stream

    def after_attention(self, index: int, stream: Residual, attended: Tensor, backend: Backend) -> Residual:
        """Return the stream after a layer. attended: [tokens, heads * dim]."""
        layer = self.layers[index]
        stream = self._add(stream, attended, layer.out, layer.attention_out_norm, backend)
        if layer.experts is not None:
            assert layer.mlp_norm is not None
            dtype = layer.experts.router.dtype
            normed, stream = norm_residual(stream, layer.mlp_norm, self.epsilon, backend, dtype)
            given = mix_experts(normed, layer.experts, backend, in_parts=self.ranks.is_alone)
            return stream.plus(self.ranks.sum(given))
        assert layer.gate_up is not None and layer.down is not None
        inner, stream = self._read(stream, layer.mlp_norm, layer.gate_up, backend, gated=True)
        return self._add(stream, inner, layer.down, layer.mlp_out_norm, backend)

    def last_logits(self, stream: Residual, attended: Tensor, rows: Tensor, backend: Backend) -> Tensor:
        """Return the logits [rows, vocab] of some rows, after the attention of the last layer.

        attended: [tokens, heads * dim]. rows: [rows] int32 or int64, of the stream and of `attended`.
        """
        if not len(rows):
            return attended.new_empty(0, self.lm_head.outputs)
        stream = self.after_attention(self.num_layers - 1, stream.rows(rows), attended[rows], backend)
        return self._logits(stream, backend)

    def _logits(self, stream: Residual, backend: Backend) -> Tensor:
        logits, _ = self._read(stream, self.norm, self.lm_head, backend)
        return logits if self.logits_scale == 1.0 else logits * self.logits_scale

    def _layers_to_run(self) -> range:
        """Return the numbers of the layers of a pass; if it only compiles, of the first and the last.

        The layers between launch the same kernels.
        """
        return range(self.num_layers)[:: max(1, self.num_layers - 1)] if compiles_only() else range(self.num_layers)

    def _read(
        self,
        stream: Residual,
        norm: Tensor | None,
        weight: LinearWeight,
        backend: Backend,
        gated: bool = False,
        in_parts: bool = False,
    ) -> tuple[Tensor, Residual]:
        return linear_of_residual(stream, norm, self.epsilon, weight, backend, gated, in_parts)

    def _add(
        self, stream: Residual, x: Tensor, weight: LinearWeight, out_norm: Tensor | None, backend: Backend
    ) -> Residual:
        if out_norm is None and self.ranks.is_alone:
            return add_linear(stream, x, weight, backend)
        out = self.ranks.sum(linear(x, weight, backend))
        if out_norm is None:
            return stream.plus(out)
        return stream.plus(add_rms_norm(out, None, out_norm, self.epsilon, backend)[0])

    def _rotate(self, index: int, qkv: Tensor, tokens: PassTokens, kv: KVCache, backend: Backend) -> Tensor:
        """Norm and rotate a layer's queries and keys, write keys and values to its pages, and return the queries."""
        layer, (k_pages, v_pages) = self.layers[index], kv.layer_pages(index)
        if layer.full_norms is not None:
            qkv = self._norm_all_heads(qkv, layer.full_norms, backend)
        rotated = self.cosines.shape[1] if layer.rotates else 0
        return rotate_and_write_kv(
            qkv,
            self.cosines[:, :rotated],
            self.sines[:, :rotated],
            tokens.positions,
            tokens.slots,
            k_pages,
            v_pages,
            self.heads,
            backend,
            layer.head_norms,
            self.epsilon,
            kv.scales_of(index),
            self.embedding.dtype,
        )

    def _norm_all_heads(self, qkv: Tensor, norms: tuple[Tensor, Tensor], backend: Backend) -> Tensor:
        of_queries, of_keys = norms
        queries, keys, values = qkv.split([len(of_queries), len(of_keys), len(of_keys)], 1)
        queries, _ = add_rms_norm(queries, None, of_queries, self.epsilon, backend)
        keys, _ = add_rms_norm(keys, None, of_keys, self.epsilon, backend)
        return torch.cat([queries, keys, values], 1)
