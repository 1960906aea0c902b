"""Shapes of real models, for benchmarks that need no weights worth anything."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specahead.engine.model.decoder import Decoder, DecoderLayer
from specahead.engine.model.families import count_experts
from specahead.kernels.kv_scales import EIGHT_BITS, KVScales
from specahead.kernels.linear import BLOCK, GroupedWeight, LinearWeight, group_weight, quantize
from specahead.kernels.mixture import Experts
from specahead.sparsity.plan import Plan

GROUP = Plan.group_size  # tokens of a group mean


@dataclass(frozen=True)
class Shape:
    """As in a transformers config of the Llama family, or of Qwen3-MoE's."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Of each expert, if there are any."""
    vocab_size: int = 128256
    experts: int = 0
    """Of each layer; 0: it has an MLP."""
    chosen: int = 0
    """Experts of a token."""


SHAPES = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336),
    "1b": Shape(16, 2048, 32, 8, 64, 8192),
    "0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936),
    "30b-a3b": Shape(48, 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8),
    "tiny": Shape(2, 64, 4, 2, 16, 128, 4096),
}


def read_shape_of(name: str) -> Shape:
    """One of SHAPES, or that of a model's config (folder or Hugging Face id)."""
    if name in SHAPES:
        return SHAPES[name]
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False)
    heads = config.num_attention_heads
    experts = count_experts(config)
    return Shape(
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.moe_intermediate_size if experts else config.intermediate_size,
        config.vocab_size,
        experts,
        config.num_experts_per_tok if experts else 0,
    )


def random_decoder(
    shape: Shape, positions: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, quantization: str = "none"
) -> Decoder:
    """Random weights. quantization: one of flags.HELD, of all linear layers but the head."""
    dim, heads, kv_heads = shape.head_dim, shape.num_attention_heads, shape.num_key_value_heads
    hidden, mlp = shape.hidden_size, shape.intermediate_size

    def random(*size: int) -> Tensor:
        return torch.empty(*size, device=device, dtype=dtype).normal_(0, 0.02)

    def weight(outputs: int, inputs: int) -> LinearWeight:
        if quantization in ("fp8-blocks", "int4"):
            return LinearWeight(_random_groups(outputs, inputs, quantization == "int4", dtype, device))
        values = random(outputs, inputs)
        return LinearWeight(quantize(values) if quantization == "fp8" else values)

    def experts() -> Experts:
        gate_up = weight(shape.experts * 2 * mlp, hidden).values
        down = weight(shape.experts * hidden, mlp).values
        router = random(shape.experts, hidden)
        return Experts(router if isinstance(down, Tensor) else router.half(), gate_up, down, shape.chosen, True)

    ones = torch.ones(hidden, device=device, dtype=dtype)
    layers = [
        DecoderLayer(
            input_norm=ones,
            qkv=weight((heads + 2 * kv_heads) * dim, hidden),
            out=weight(hidden, heads * dim),
            mlp_norm=ones,
            gate_up=None if shape.experts else weight(2 * mlp, hidden),
            down=None if shape.experts else weight(hidden, mlp),
            experts=experts() if shape.experts else None,
        )
        for _ in range(shape.num_hidden_layers)
    ]
    angles = torch.rand(2, positions, dim // 2, device=device)
    return Decoder(
        embedding=random(shape.vocab_size, hidden),
        layers=layers,
        norm=ones,
        lm_head=LinearWeight(random(shape.vocab_size, hidden)),
        cosines=angles[0],
        sines=angles[1],
        heads=heads,
        kv_heads=kv_heads,
        epsilon=1e-5,
        attention_scale=dim**-0.5,
    )


def _random_groups(outputs: int, inputs: int, in_four_bits: bool, dtype: torch.dtype, device: str) -> GroupedWeight:
    """Return a random weight in groups of BLOCK inputs."""
    scales = torch.full((outputs, inputs // BLOCK), 0.005, device=device)
    if not in_four_bits:
        return group_weight((4 * torch.randn(outputs, inputs, device=device)).to(EIGHT_BITS), scales, None, dtype)
    values = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device=device)
    return group_weight(values, scales.half(), torch.full_like(scales, 8, dtype=torch.uint8), dtype)


def random_scales(shape: Shape, device: str | torch.device) -> KVScales:
    """Return scales of 1 and random centers, for KV in 8 bits."""
    rows = shape.num_hidden_layers, 2, shape.num_key_value_heads
    return KVScales(torch.ones(rows, device=device), torch.randn(*rows, shape.head_dim, device=device))
