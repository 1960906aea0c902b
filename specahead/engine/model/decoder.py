"""A decoder-only transformer with gated MLPs and RMS norms: what describes it, and its forward pass over paged KV.

The description says in which order norms, residuals and scales are applied, so one pass serves all families that
engine.families reads. The pass makes as few launches as it can: fused weights and small kernels, and for a few rows
linear layers that include what stands beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.compiling import compiles_only
from specahead.kernels.embedding import embed_in_float32
from specahead.kernels.few_rows_linear import MOST_ROWS, EightBitWeight, few_rows_linear, takes
from specahead.kernels.gated_activation import silu_and_multiply
from specahead.kernels.residual_linear import (
    MOST_NORMED_ROWS,
    RmsNorm,
    Unscaled,
    add_linear,
    gated_of_norm,
    parts_of_norm,
)
from specahead.kernels.rms_norm import add_rms_norm, add_scaled
from specahead.kernels.rotary import rotate_and_write_kv
from specahead.kernels.skinny_linear import is_skinny, skinny_linear

# What a layer does with its rotated queries: (layer, queries [tokens, heads, dim]) -> [tokens, heads, dim].
Attend = Callable[[int, Tensor], Tensor]
# What a layer does with queries, keys and values side by side: (layer, qkv) -> [tokens, heads * dim].
AttendToQkv = Callable[[int, Tensor | Unscaled], Tensor]
# Rows from which on weights of 16 bits are read sooner where sums are added in any order than by skinny layers.
_LEAST_ROWS_IN_ANY_ORDER = 2


@dataclass(frozen=True)
class EightBitLayer:
    """Weights of a layer once more, in 8 bits, for passes of few rows."""

    qkv: EightBitWeight
    out: EightBitWeight
    gate_up: EightBitWeight
    down: EightBitWeight


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of a layer; a norm that is None is left out.

    input_norm, mlp_norm: [hidden], of what attention and the MLP read. attention_out_norm, mlp_out_norm: [hidden], of
    what they give, before it is added to the residual (OLMo-2).
    qkv: [(heads + 2 * kv_heads) * head_dim, hidden], queries, keys, values below one another; qkv_bias: [its rows]
    out: [hidden, heads * head_dim]; out_bias: [hidden]
    gate_up: [2 * inner, hidden], gate, up; down: [hidden, inner]
    head_norms: [2, head_dim], of each head's query and of each head's key (Qwen3).
    full_norms: [heads * head_dim] and [kv_heads * head_dim], of all heads' queries and keys together (OLMo-2).
    rotates: whether the layer turns queries and keys by their positions. eight_bit: what passes of few rows read.
    wide_norms: input_norm and mlp_norm in float32, where passes of few rows add sums in any order over 16 bits.
    """

    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    mlp_norm: Tensor | None
    gate_up: Tensor
    down: Tensor
    out_bias: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    head_norms: Tensor | None = None
    full_norms: tuple[Tensor, Tensor] | None = None
    rotates: bool = True
    eight_bit: EightBitLayer | None = None
    wide_norms: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Decoder:
    """A model's weights, and the numbers that its layers share.

    embedding: [at least vocab, hidden]; lm_head: [vocab, hidden]
    cosines, sines: [max positions, turned / 2] float32, any scaling of them included; `turned` dimensions of a head
    rotate, mostly all.
    epsilon: of all norms. attention_scale: what products of queries and keys are multiplied by. embedding_scale,
    residual_scale, logits_scale: what embeddings, the outputs of attention and MLP, and logits are multiplied by
    (Granite). eight_bit_head: the lm_head in 8 bits, if the layers are held so, too. in_any_order: whether passes of
    few rows add sums in any order: they differ in their last bits from run to run, and take less time.
    """

    embedding: Tensor
    layers: list[DecoderLayer]
    norm: Tensor
    lm_head: Tensor
    cosines: Tensor
    sines: Tensor
    heads: int
    kv_heads: int
    epsilon: float
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    eight_bit_head: EightBitWeight | None = None
    in_any_order: bool = False

    can_capture = True  # in CUDA graphs

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def with_vocabulary(self, count: int) -> "Decoder":
        """Return the decoder with the logits of the ids below `count` alone."""
        return replace(self, lm_head=self.lm_head[:count])

    @property
    def numbered_layers(self) -> list[tuple[int, DecoderLayer]]:
        """The layers that a pass runs: all; of one whose launches are compiled alone, the first and the last, since
        those between launch the same.
        """
        numbered = list(enumerate(self.layers))
        return numbered[:: max(1, len(numbered) - 1)] if compiles_only() else numbered

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor | list[Tensor],
        k_pages: list[Tensor],
        v_pages: list[Tensor],
        attend: Attend,
        logits_rows: Tensor | None = None,
        backend: Backend | None = None,
    ) -> Tensor:
        """Return the logits [rows, vocab] of all tokens or of `logits_rows` (int32 or int64), and write the tokens' KV.

        token_ids, positions, slots: [tokens] int64; a negative slot is not written. slots: of all layers or of each.
        backend: of all kernels but attention; None: the device's. Behind the last layer's attention only rows that give
        logits run on: of other tokens nothing but keys and values is needed there.
        """
        kernels = backend or default_backend(token_ids.device)

        def attention(index: int, qkv: Tensor | Unscaled) -> Tensor:
            layer = self.layers[index]
            if layer.full_norms is not None:
                assert isinstance(qkv, Tensor)
                qkv = _norm_all_heads(qkv, layer.full_norms, self.epsilon, kernels)
            queries = rotate_and_write_kv(
                qkv,
                self.cosines if layer.rotates else self.cosines[:, :0],
                self.sines if layer.rotates else self.sines[:, :0],
                positions,
                slots if isinstance(slots, Tensor) else slots[index],
                k_pages[index],
                v_pages[index],
                self.heads,
                kernels,
                layer.head_norms,
                self.epsilon,
                layer.qkv_bias if isinstance(qkv, Unscaled) else None,
            )
            return attend(index, queries).flatten(1)

        rows = max(len(token_ids), 0 if logits_rows is None else len(logits_rows))
        if self._adds_in_any_order(rows):
            return _run_in_any_order(self, token_ids, attention, logits_rows, kernels)
        hidden = F.embedding(token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        norms_outputs = any(
            norm is not None for layer in self.layers for norm in (layer.attention_out_norm, layer.mlp_out_norm)
        )
        stays_skinny = is_skinny(hidden) and (logits_rows is None or len(logits_rows) <= len(hidden))
        # Weights in 8 bits are read sooner than skinny layers read them in 16.
        if kernels == "triton" and stays_skinny and not norms_outputs and self.eight_bit_head is None:
            return _run_skinny(self, hidden, attention, logits_rows)
        return _run_wide(self, hidden, attention, logits_rows, kernels)

    def _adds_in_any_order(self, rows: int) -> bool:
        """Whether a pass of so many rows adds sums in any order."""
        in_16_bits = _LEAST_ROWS_IN_ANY_ORDER, MOST_NORMED_ROWS
        least, most = in_16_bits if self.eight_bit_head is None else (1, MOST_ROWS)
        return self.in_any_order and least <= rows <= most


def _norm_all_heads(qkv: Tensor, norms: tuple[Tensor, Tensor], epsilon: float, backend: Backend) -> Tensor:
    """qkv with its queries and its keys normed, all heads of a token together."""
    queries, keys, values = qkv.tensor_split([len(norms[0]), len(norms[0]) + len(norms[1])], 1)
    normed = [
        add_rms_norm(x, None, weight, epsilon, backend)[0] for x, weight in zip((queries, keys), norms, strict=True)
    ]
    return torch.cat([*normed, values], 1)


def _run_wide(
    decoder: Decoder, hidden: Tensor, attention: AttendToQkv, logits_rows: Tensor | None, backend: Backend
) -> Tensor:
    """Return the logits of any number of rows. hidden: [rows, hidden], the embeddings

    More rows may give logits than run, since each sequence has room for as many.
    """
    residual: Tensor | None = None
    few = len(hidden) <= MOST_ROWS  # a pass over more reads no layer in 8 bits
    in_eight_bits = few and decoder.eight_bit_head is not None
    # What is multiplied with 8-bit weights; outputs are given in the model's dtype again.
    half = torch.float16 if in_eight_bits and backend == "triton" else None
    for index, layer in decoder.numbered_layers:
        light = layer.eight_bit if few else None
        normed, residual = _add_and_norm(decoder, hidden, residual, layer.input_norm, backend, half)
        qkv = _linear(
            normed, layer.qkv, light.qkv if light else None, backend, layer.qkv_bias, in_parts=layer.full_norms is None
        )
        attended = attention(index, qkv)
        if logits_rows is not None and index == decoder.num_layers - 1:
            if not len(logits_rows):
                return attended.new_empty(0, len(decoder.lm_head))
            attended, residual = attended[logits_rows], residual[logits_rows]
        in_parts = layer.attention_out_norm is None and layer.mlp_norm is not None
        hidden = _linear(attended, layer.out, light.out if light else None, backend, layer.out_bias, in_parts=in_parts)
        if layer.attention_out_norm is not None:
            hidden, _ = add_rms_norm(hidden, None, layer.attention_out_norm, decoder.epsilon, backend)
        normed, residual = _add_and_norm(decoder, hidden, residual, layer.mlp_norm, backend, half)
        inner = _linear(normed, layer.gate_up, light.gate_up if light else None, backend, gated=True, dtype=half)
        in_parts = layer.mlp_out_norm is None and layer.input_norm is not None
        hidden = _linear(inner, layer.down, light.down if light else None, backend, in_parts=in_parts)
        if layer.mlp_out_norm is not None:
            hidden, _ = add_rms_norm(hidden, None, layer.mlp_out_norm, decoder.epsilon, backend)
    normed, _ = _add_and_norm(decoder, hidden, residual, decoder.norm, backend, half)
    logits = _linear(normed, decoder.lm_head, decoder.eight_bit_head if few else None, backend)
    return logits if decoder.logits_scale == 1.0 else logits * decoder.logits_scale


def _linear(
    x: Tensor,
    weight: Tensor,
    light: EightBitWeight | None,
    backend: Backend,
    bias: Tensor | None = None,
    gated: bool = False,
    in_parts: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a linear layer of x [rows, inputs]: of few rows by a kernel that is bound by reading weights.

    light: the weight in 8 bits, if it is held so. in_parts: whether the result may be [parts, rows, outputs] float32,
    to be added up. dtype: of the result, if not the model's.
    """
    held = weight if light is None or len(x) > MOST_ROWS else light
    if held is light or (backend == "triton" and takes(x)):
        return few_rows_linear(x, held, bias, gated, in_parts, backend, dtype or weight.dtype)
    out = F.linear(x.to(weight.dtype), weight, bias)
    return silu_and_multiply(out, backend) if gated else out


def _add_and_norm(
    decoder: Decoder,
    hidden: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    backend: Backend,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return what the next part reads, and the residual with `hidden` added; hidden itself is the first residual.

    dtype: of a norm, if not the model's.
    """
    if norm is not None:
        return add_rms_norm(hidden, residual, norm, decoder.epsilon, backend, decoder.residual_scale, dtype)
    total = hidden if residual is None else add_scaled(hidden, residual, decoder.residual_scale)
    return total, total


def _run_in_any_order(
    decoder: Decoder, token_ids: Tensor, attention: AttendToQkv, logits_rows: Tensor | None, backend: Backend
) -> Tensor:
    """Return the logits of a few rows, of a decoder whose layers add to a residual in float32, in any order."""
    residual = embed_in_float32(token_ids, decoder.embedding, decoder.embedding_scale, backend)
    scale, of_norms = decoder.residual_scale, (decoder.epsilon, backend)
    for index, layer in decoder.numbered_layers:
        weights = layer.eight_bit or layer
        attended = attention(index, _qkv_of(layer, residual, *of_norms))
        if logits_rows is not None and index == decoder.num_layers - 1:
            if not len(logits_rows):
                return attended.new_empty(0, len(decoder.lm_head))
            attended, residual = (rows[logits_rows] for rows in (attended, residual))
        add_linear(residual, attended, weights.out, scale, backend)
        add_linear(residual, _inner_of(layer, residual, *of_norms), weights.down, scale, backend)
    half = torch.float16 if decoder.eight_bit_head is not None else None
    normed, _ = add_rms_norm(residual, None, decoder.norm, *of_norms, dtype=half or decoder.norm.dtype)
    logits = few_rows_linear(
        normed, decoder.eight_bit_head or decoder.lm_head, None, backend=backend, dtype=decoder.norm.dtype
    )
    return logits if decoder.logits_scale == 1.0 else logits * decoder.logits_scale


def _qkv_of(layer: DecoderLayer, residual: Tensor, epsilon: float, backend: Backend) -> Tensor | Unscaled:
    """Return a layer's queries, keys and values of a residual in float32. In 8 bits its norm is a launch of its own,
    since inputs that are normed as they are read keep such weights waiting.
    """
    if layer.eight_bit is None:
        assert layer.wide_norms is not None
        return parts_of_norm(residual, RmsNorm(layer.wide_norms[0], epsilon), layer.qkv, backend)
    normed = _norm_to_half(residual, layer.input_norm, epsilon, backend)
    how = layer.qkv_bias, False, True, backend, layer.qkv.dtype
    return few_rows_linear(normed, layer.eight_bit.qkv, *how)


def _inner_of(layer: DecoderLayer, residual: Tensor, epsilon: float, backend: Backend) -> Tensor:
    """Return what the MLP of a layer has between its linear layers."""
    if layer.eight_bit is None:
        assert layer.wide_norms is not None
        return gated_of_norm(residual, RmsNorm(layer.wide_norms[1], epsilon), layer.gate_up, backend)
    normed = _norm_to_half(residual, layer.mlp_norm, epsilon, backend)
    return few_rows_linear(normed, layer.eight_bit.gate_up, gated=True, backend=backend)


def _norm_to_half(residual: Tensor, weight: Tensor | None, epsilon: float, backend: Backend) -> Tensor:
    assert weight is not None
    return add_rms_norm(residual, None, weight, epsilon, backend, dtype=torch.float16)[0]


def _run_skinny(decoder: Decoder, hidden: Tensor, attention: AttendToQkv, logits_rows: Tensor | None) -> Tensor:
    """Return the logits of a few rows, of a decoder that norms no outputs. hidden: [rows, hidden], the embeddings"""
    epsilon, scale = decoder.epsilon, decoder.residual_scale
    for index, layer in decoder.numbered_layers:
        qkv = skinny_linear(hidden, layer.qkv, layer.qkv_bias, layer.input_norm, epsilon, backend="triton")
        attended = attention(index, qkv)
        if logits_rows is not None and index == decoder.num_layers - 1:
            if not len(logits_rows):
                return attended.new_empty(0, len(decoder.lm_head))
            attended, hidden = attended[logits_rows], hidden[logits_rows]
        hidden = skinny_linear(attended, layer.out, layer.out_bias, residual=hidden, scale=scale, backend="triton")
        inner = skinny_linear(hidden, layer.gate_up, None, layer.mlp_norm, epsilon, gated=True, backend="triton")
        hidden = skinny_linear(inner, layer.down, residual=hidden, scale=scale, backend="triton")
    head = decoder.lm_head, None, decoder.norm, epsilon
    return skinny_linear(hidden, *head, scale=decoder.logits_scale, backend="triton")
