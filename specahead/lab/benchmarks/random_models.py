"""Models of random weights in the shapes of real ones, for benchmarks within one process."""

from functools import partial

import torch
from torch import Tensor

from specahead.engine.model.decoder import Decoder, DecoderLayer
from specahead.engine.model.families import block_rule
from specahead.kernels.kv_scales import EIGHT_BITS, KVScales
from specahead.kernels.linear import BLOCK, EightBitWeight, GroupedWeight, LinearWeight, group_weight, quantize
from specahead.kernels.mixture import Experts
from specahead.lab.benchmarks.shapes import Shape
from specahead.sparsity.plan import Plan

GROUP = Plan.group_size  # tokens of a group mean


def random_decoder(
    shape: Shape, positions: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, quantization: str = "none"
) -> Decoder:
    """Random weights. quantization: one of flags.HELD, of all linear layers but the head."""
    dim, heads, kv_heads = shape.head_dim, shape.num_attention_heads, shape.num_key_value_heads
    hidden, mlp = shape.hidden_size, shape.intermediate_size

    def weight(outputs: int, inputs: int) -> LinearWeight:
        return LinearWeight(_random_weight(outputs, inputs, quantization, dtype, device))

    if shape.drafted:
        raise ValueError("a head is measured by `bench serve --draft-shape` alone: it runs in its target's process")
    ones = torch.ones(hidden, device=device, dtype=dtype)
    layers = [
        DecoderLayer(
            input_norm=ones,
            qkv=weight((heads + 2 * kv_heads) * dim, hidden),
            out=weight(hidden, heads * dim),
            mlp_norm=ones,
            gate_up=None if shape.experts else weight(2 * mlp, hidden),
            down=None if shape.experts else weight(hidden, mlp),
            experts=random_experts(shape, quantization, device, dtype) if shape.experts else None,
        )
        for _ in range(shape.num_hidden_layers)
    ]
    angles = torch.rand(2, positions, dim // 2, device=device)
    return Decoder(
        embedding=_random(shape.vocab_size, hidden, dtype, device),
        layers=layers,
        norm=ones,
        lm_head=LinearWeight(_random(shape.vocab_size, hidden, dtype, device)),
        cosines=angles[0],
        sines=angles[1],
        heads=heads,
        kv_heads=kv_heads,
        epsilon=1e-5,
        attention_scale=dim**-0.5,
        block_rule=block_rule(shape),
    )


def random_experts(
    shape: Shape, quantization: str = "none", device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Experts:
    """Return the experts of one layer. quantization: as for `random_decoder`."""
    weight = partial(_random_weight, quantization=quantization, dtype=dtype, device=device)
    down = weight(shape.experts * shape.hidden_size, shape.intermediate_size)
    of_router = dtype if isinstance(down, Tensor) else torch.float16
    return Experts(
        router=_random(shape.experts, shape.hidden_size, of_router, device),
        gate_up=weight(shape.experts * 2 * shape.intermediate_size, shape.hidden_size),
        down=down,
        chosen=shape.chosen,
        renormed=True,
    )


def _random(outputs: int, inputs: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(outputs, inputs, device=device, dtype=dtype).normal_(0, 0.02)


def _random_weight(
    outputs: int, inputs: int, quantization: str, dtype: torch.dtype, device: str
) -> Tensor | EightBitWeight | GroupedWeight:
    if quantization in ("fp8-blocks", "int4"):
        return _random_groups(outputs, inputs, quantization == "int4", dtype, device)
    values = _random(outputs, inputs, dtype, device)
    return quantize(values) if quantization == "fp8" else values


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
