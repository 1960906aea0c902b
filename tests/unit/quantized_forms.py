"""The forms of quantized checkpoints as users have them, written by the rules of the libraries that make them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Of a weight [outputs, inputs]: what stands for it in the files, by the last part of the name, and its numbers.
Written = tuple[dict[str, Tensor], Tensor]
LARGEST = 448


def in_eight_bits(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 numbers, and what they stand for. scales: of each weight, in its shape."""
    values = (weight / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values, values.float() * scales


def from_parts(parts: Sequence[Tensor], sizes: Sequence[int], dim: int) -> Tensor:
    """Return the weight whose slices of `sizes` along `dim` the ranks hold equal parts of."""
    split = [part.split([size // len(parts) for size in sizes], dim) for part in parts]
    return torch.cat([each for slices in zip(*split, strict=True) for each in slices], dim)


def by_tensor(weight: Tensor) -> Written:
    scale = weight.abs().max() / LARGEST
    values, plain = in_eight_bits(weight, scale)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, plain


def by_tensor_of_transformers(weight: Tensor) -> Written:
    """transformers, FP8Linear without blocks."""
    written, plain = by_tensor(weight)
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    return {names.get(name, name): tensor for name, tensor in written.items()}, plain


def by_channel(weight: Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).bfloat16()
    values, plain = in_eight_bits(weight, scales.float())
    return {"weight": values, "weight_scale": scales}, plain


def by_block(name: str) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        outputs, inputs = weight.shape
        scales = torch.empty(-(-outputs // 128), -(-inputs // 128))
        for row in range(len(scales)):
            for column in range(len(scales[0])):
                block = weight[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
                scales[row, column] = block.abs().max() / LARGEST
        wide = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        values, plain = in_eight_bits(weight, wide)
        return {"weight": values, name: scales}, plain

    return write


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Words of 4-bit integers: of each eight of a row, number order[i] lies at the bits from 4 i on."""
    eights = numbers.to(torch.int64).unflatten(1, (-1, 8))
    words = sum(eights[..., source] << 4 * place for place, source in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def in_four_bits(weight: Tensor, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0 to 15 [outputs, inputs], and scales and zeros [outputs, groups]."""
    groups = weight.unflatten(1, (-1, group or weight.shape[1]))
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((2 * groups.abs().amax(2) if symmetric else most - least) / 15).to(dtype)
    zeros = torch.full_like(scales, 8) if symmetric else (-least / scales).round().clamp(0, 15)
    numbers = (groups / scales.float()[..., None] + zeros.float()[..., None]).round().clamp(0, 15)
    return numbers.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8)


def numbers_of(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = numbers.float().unflatten(1, (scales.shape[1], -1)) - zeros.float()[..., None]
    return (groups * scales.float()[..., None]).flatten(1)


def by_awq(weight: Tensor) -> Written:
    """AutoAWQ, WQLinear_GEMM.from_linear."""
    numbers, scales, zeros = in_four_bits(weight, 64, False, torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    written = {"qweight": packed(numbers.t(), order), "qzeros": packed(zeros.t(), order), "scales": scales.t()}
    return written, numbers_of(numbers, scales, zeros)


def by_gptq(group: int, symmetric: bool, less: int) -> Callable[[Tensor], Written]:
    """AutoGPTQ, QuantLinear.pack; its first layout stores zeros less one."""

    def write(weight: Tensor) -> Written:
        numbers, scales, zeros = in_four_bits(weight, group, symmetric, torch.float16)
        zeros = zeros.clamp(min=less)  # the first layout has no zero of 0
        written = {"qweight": packed(numbers).t(), "qzeros": packed(zeros.t() - less), "scales": scales.t()}
        written["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // (group or weight.shape[1])
        return written, numbers_of(numbers, scales, zeros)

    return write


def by_compressed_tensors(group: int, symmetric: bool, in_words: bool = True) -> Callable[[Tensor], Written]:
    """compressed-tensors, PackQuantizedCompressor. in_words: whether zeros are, as since release 0.10."""

    def write(weight: Tensor) -> Written:
        numbers, scales, zeros = in_four_bits(weight, group, symmetric, torch.bfloat16)
        written = {"weight_packed": packed(numbers), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            signed = (zeros.to(torch.int16) - 8).to(torch.int8)
            written["weight_zero_point"] = packed(zeros.t()).t() if in_words else signed
        return written, numbers_of(numbers, scales, zeros)

    return write


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}},
        **{"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"},
        **{"sparsity_config": {}, "transform_config": {}, "version": "0.12.2"},
    }


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False, "lm_head": False}
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, by_tensor),
    "fp8 tensor of transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        by_tensor_of_transformers,
    ),
    "compressed channel": (compressed("float-quantized", FLOATS | {"strategy": "channel"}, BY_TOKEN), by_channel),
    "fp8 blocks": (BLOCKS | {"modules_to_not_convert": ["lm_head"]}, by_block("weight_scale_inv")),
    "compressed blocks": (
        compressed("float-quantized", FLOATS | {"strategy": "block", "block_structure": [128, 128]}, BY_TOKEN),
        by_block("weight_scale"),
    ),
    "awq": (AWQ, by_awq),
    "gptq": (GPTQ | {"sym": True}, by_gptq(128, True, 1)),
    "gptq of all inputs": (GPTQ | {"group_size": -1}, by_gptq(0, False, 1)),
    "gptq_v2": (GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"}, by_gptq(32, False, 0)),
    "packed": (compressed("pack-quantized", INTEGERS, None), by_compressed_tensors(128, True)),
    "packed asymmetric": (
        compressed("pack-quantized", INTEGERS | {"symmetric": False, "actorder": "weight"}, None),
        by_compressed_tensors(128, False),
    ),
    "packed of an old release": (
        compressed("pack-quantized", INTEGERS | {"symmetric": False, "group_size": 32}, None),
        by_compressed_tensors(32, False, in_words=False),
    ),
    "packed channel": (
        compressed("pack-quantized", INTEGERS | {"strategy": "channel", "group_size": None}, None),
        by_compressed_tensors(0, True),
    ),
}
