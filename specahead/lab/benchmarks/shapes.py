"""Shapes of real models, for benchmarks that need no weights worth anything."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specahead.engine.loading.config import load_config
from specahead.engine.model.decoder import Decoder, DecoderLayer
from specahead.engine.model.families import block_rule, count_experts
from specahead.kernels.chosen_blocks import BlockRule
from specahead.kernels.kv_scales import EIGHT_BITS, KVScales
from specahead.kernels.linear import BLOCK, EightBitWeight, GroupedWeight, LinearWeight, group_weight, quantize
from specahead.kernels.mixture import Experts
from specahead.sparsity.plan import Plan

GROUP = Plan.group_size  # tokens of a group mean


@dataclass(frozen=True)
class Shape:
    """As in a transformers config of the Llama family, of Qwen3's, dense or a mixture, or of MiniCPM4's."""

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
    block_rule: BlockRule | None = None
    """How attention chooses blocks; None: it reads everything."""
    drafted: int = 0
    """Tokens that an EAGLE-3 head drafts of the vocabulary; 0: it is a model by itself."""
    model_type: str = "llama"
    """As transformers names it."""
    tied: bool = False
    """Whether the embedding is the head as well."""


SHAPES = {
    "70b": Shape(80, 8192, 64, 8, 128, 28672),
    "8b": Shape(32, 4096, 32, 8, 128, 14336),
    "1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936),
    "1b": Shape(16, 2048, 32, 8, 64, 8192),
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, model_type="qwen3", tied=True),
    "0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936),
    "30b-a3b": Shape(48, 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8, model_type="qwen3_moe"),
    "minicpm4-8b": Shape(
        32, 4096, 32, 2, 128, 16384, 73448, block_rule=BlockRule(64, 96, 1, 32, 8192), model_type="minicpm"
    ),
    "eagle3-8b": Shape(1, 4096, 32, 8, 128, 14336, drafted=32000),
    "eagle3-70b": Shape(1, 8192, 64, 8, 128, 28672, drafted=32000),
    "tiny": Shape(2, 64, 4, 2, 16, 128, 4096),
}


def read_shape_of(name: str) -> Shape:
    """One of SHAPES, or that of a model's config (folder or Hugging Face id)."""
    if name in SHAPES:
        return SHAPES[name]
    config = load_config(name)
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
        block_rule(config),
        model_type=config.model_type,
        tied=config.tie_word_embeddings,
    )


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
        block_rule=shape.block_rule,
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
