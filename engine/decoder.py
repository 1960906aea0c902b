"""A decoder-only transformer of the Llama family, as few launches as its step needs.

The weights are those of the transformers model, whose modules keep working: they become views of the fused ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backends import Backend
from kernels.gated_activation import silu_and_multiply
from kernels.rms_norm import add_rms_norm
from kernels.rotary import rotate_and_write_kv
from kernels.skinny_linear import is_skinny, skinny_linear

# What a layer does with its rotated queries: (layer, queries [tokens, heads, dim]) -> [tokens, heads, dim].
Attend = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderLayer:
    """qkv: queries, keys, values below one another; gate_up: gate, up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Decoder:
    """cosines, sines: [max positions, head_dim / 2] float32, any scaling of them included."""

    embedding: Tensor
    layers: list[DecoderLayer]
    norm: Tensor
    lm_head: Tensor
    cosines: Tensor
    sines: Tensor
    heads: int
    kv_heads: int
    epsilon: float


ARCHITECTURES = ("llama", "mistral", "qwen2")


def is_supported(config: Any) -> bool:
    """Whether `read_decoder` takes the model; others run through transformers' own modules."""
    return (
        config.model_type in ARCHITECTURES
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and not (config.model_type == "llama" and config.attention_bias)
        and not _rotates_by_length(config)
    )


def _rotates_by_length(config: Any) -> bool:
    """Whether the rotary table depends on the sequence's length, so that no table serves all."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default") in ("dynamic", "longrope")


@torch.inference_mode()
def read_decoder(model: nn.Module) -> Decoder:
    """Fuse the weights of a transformers causal LM in place. Raises NotImplementedError for other architectures."""
    config: Any = model.config
    if not is_supported(config):
        raise NotImplementedError(
            f"{config.model_type}: the fused decoder is built for {', '.join(ARCHITECTURES)}, silu MLPs without biases"
        )
    inner: Any = model.model
    cosines, sines = _rotary_table(inner, config.max_position_embeddings)
    return Decoder(
        embedding=inner.embed_tokens.weight,
        layers=[_read_layer(layer) for layer in inner.layers],
        norm=inner.norm.weight,
        lm_head=model.lm_head.weight,  # type: ignore[union-attr,arg-type]
        cosines=cosines,
        sines=sines,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        epsilon=config.rms_norm_eps,
    )


def _read_layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_fuse([module.weight for module in projections]),
        qkv_bias=None
        if attention.q_proj.bias is None
        else torch.cat([module.bias for module in projections]),
        out=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_fuse([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )


def _fuse(weights: list[nn.Parameter]) -> Tensor:
    """One matrix of several; the parameters become views of it, so that nothing is held twice."""
    fused = torch.cat([weight.data for weight in weights])
    for weight, part in zip(weights, fused.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return fused


def _rotary_table(inner: Any, positions: int) -> tuple[Tensor, Tensor]:
    device = inner.embed_tokens.weight.device
    like = torch.zeros(1, dtype=torch.float32, device=device)
    cosines, sines = inner.rotary_emb(like, torch.arange(positions, device=device)[None])
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()


def run_decoder(
    decoder: Decoder,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor | list[Tensor],
    k_pages: list[Tensor],
    v_pages: list[Tensor],
    attend: Attend,
    backend: Backend,
    logits_rows: Tensor | None = None,
) -> Tensor:
    """Logits [rows, vocab] of all tokens or of `logits_rows` (int64); writes the tokens' KV.

    token_ids, positions, slots: [tokens] int64; a negative slot is not written. slots: of all layers or of each
    """

    def attention(index: int, qkv: Tensor) -> Tensor:
        queries = rotate_and_write_kv(
            qkv,
            decoder.cosines,
            decoder.sines,
            positions,
            slots if isinstance(slots, Tensor) else slots[index],
            k_pages[index],
            v_pages[index],
            decoder.heads,
            backend,
        )
        return attend(index, queries).flatten(1)

    hidden = F.embedding(token_ids, decoder.embedding)
    if backend == "triton" and is_skinny(hidden):
        return _run_skinny(decoder, hidden, attention, logits_rows)
    residual = None
    for index, layer in enumerate(decoder.layers):
        normed, residual = add_rms_norm(hidden, residual, layer.input_norm, decoder.epsilon, backend)
        hidden = F.linear(attention(index, F.linear(normed, layer.qkv, layer.qkv_bias)), layer.out)
        normed, residual = add_rms_norm(hidden, residual, layer.post_norm, decoder.epsilon, backend)
        hidden = F.linear(silu_and_multiply(F.linear(normed, layer.gate_up), backend), layer.down)
    if logits_rows is not None:
        hidden = hidden[logits_rows]
        residual = None if residual is None else residual[logits_rows]
    normed, _ = add_rms_norm(hidden, residual, decoder.norm, decoder.epsilon, backend)
    return F.linear(normed, decoder.lm_head)


def _run_skinny(
    decoder: Decoder, hidden: Tensor, attention: Callable[[int, Tensor], Tensor], logits_rows: Tensor | None
) -> Tensor:
    """The layers over a few rows. attention: (layer, queries, keys, values side by side) -> [rows, heads * dim]"""
    epsilon = decoder.epsilon
    for index, layer in enumerate(decoder.layers):
        qkv = skinny_linear(hidden, layer.qkv, layer.qkv_bias, layer.input_norm, epsilon, backend="triton")
        attended = attention(index, qkv)
        hidden = skinny_linear(attended, layer.out, residual=hidden, backend="triton")
        inner = skinny_linear(
            hidden, layer.gate_up, None, layer.post_norm, epsilon, gated=True, backend="triton"
        )
        hidden = skinny_linear(inner, layer.down, residual=hidden, backend="triton")
    if logits_rows is not None:
        hidden = hidden[logits_rows]
    return skinny_linear(hidden, decoder.lm_head, None, decoder.norm, epsilon, backend="triton")
