"""How linear layers are held in fewer than 16 bits, and which such models are built.

They come so in checkpoints, whose config says how, or are rounded to 8 bits as they are loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specahead.engine.model.families import FAMILIES, head_dim, inner_size, unbuilt_feature
from specahead.kernels.linear import BLOCK, GROUPS

LEAST_CAPABILITY = (8, 9)  # of GPUs that convert and multiply numbers of 8 bits (e4m3)
_BUILT = (
    "built are 8-bit floats (e4m3) with a scale for each tensor, each output channel or each block of 128 x 128 "
    "(compressed-tensors float-quantized, and fp8), and 4-bit integers in groups of 32, 64, 128 or all inputs (AWQ "
    "gemm, GPTQ without desc_act, compressed-tensors pack-quantized): take such a checkpoint, or the 16-bit one with "
    "--quantization fp8"
)


@dataclass(frozen=True)
class Storage:
    """How a model holds its linear layers but the head."""

    bits: Literal[4, 8, 16] = 16
    """Of a weight: 4-bit integers, 8-bit floats (e4m3), or 16 for the model's dtype."""
    layout: Literal["plain", "blocks", "awq", "gptq", "gptq_v2", "packed"] = "plain"
    """How the files of a checkpoint lay them out (engine.loading.packed). Only plain weights are not in groups."""
    group: int = 0
    """Inputs that share a scale; 0: all inputs of an output do."""

    @property
    def in_groups(self) -> bool:
        return self.layout != "plain"

    def bytes_of_weight(self, dtype: torch.dtype) -> float:
        """Return the bytes of a weight and of its share of a scale and a zero. dtype: the model's."""
        if self.bits == 16:
            return dtype.itemsize
        beside = 4 if self.bits == 8 else 3
        return self.bits / 8 + (beside / self.group if self.group else 0)


def storage_of(config: Any, quantization: str = "none") -> Storage:
    """Return how linear layers are held: by the setting `quantization`, or as the checkpoint comes.

    config: of transformers. Raises NotImplementedError, by name, for a checkpoint whose quantization is not built, and
    ValueError for one that is quantized and would be rounded by the setting as well.
    """
    said = getattr(config, "quantization_config", None)
    if not said:
        return Storage(8 if quantization == "fp8" else 16)
    model = getattr(config, "name_or_path", "") or config.model_type
    if quantization == "fp8":
        raise ValueError(
            f"{model}: --quantization fp8 is given, and its weights are quantized already, by "
            f"{said.get('quant_method')}: leave the flag out, or take the 16-bit checkpoint"
        )
    held = _storage(said)
    if isinstance(held, str):
        raise NotImplementedError(f"{model}: its weights are quantized by {held}, which is not built; {_BUILT}")
    return held


def check_storage(config: Any, held: Storage, dtype: torch.dtype, device: str, ranks: int = 1) -> None:
    """Raise NotImplementedError if a model of this config cannot be held so on the device.

    ranks: over which its heads and columns are split.
    """
    if held.bits == 16:
        return
    reason = unbuilt_feature(config, on_gpu=device != "cpu") or unbuilt_in(held, config, dtype, device, ranks)
    if reason is None and device != "cpu" and dtype != torch.bfloat16:
        reason = f"results in {dtype} (bfloat16 is built)"
    if reason is not None:
        raise NotImplementedError(f"{config.model_type}: weights in {held.bits} bits are not built for {reason}")


def unbuilt_in(held: Storage, config: Any, dtype: torch.dtype, device: str, ranks: int = 1) -> str | None:
    """Return why no kernel reads the layers of such a model, one of FAMILIES, as they are held; None if they do."""
    family = FAMILIES[config.model_type]
    if None in (family.input_norm, family.mlp_norm):
        return "layers that do not norm what attention and the MLP read"
    if device == "cpu" and not held.in_groups:
        return None
    if device != "cpu" and held.bits == 8 and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"GPUs of a compute capability below {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    of_ranks = (size // ranks for size in (inner_size(config), config.num_attention_heads * head_dim(config)))
    inputs = config.hidden_size, *of_ranks
    odd = [size for size in inputs if size % BLOCK]
    if odd:
        return f"layers of {odd[0]} inputs, which is no multiple of {BLOCK}"
    return "float32" if dtype == torch.float32 and device != "cpu" else None


def _storage(said: Mapping[str, Any]) -> Storage | str:
    """Return how a checkpoint holds its weights by its quantization_config, or what of that is not built."""
    readers = {"compressed-tensors": _of_compressed_tensors, "fp8": _of_fp8, "awq": _of_awq, "gptq": _of_gptq}
    method = str(said.get("quant_method", "a method without a name"))
    return readers[method](said) if method in readers else method


def _of_fp8(said: Mapping[str, Any]) -> Storage | str:
    blocks = said.get("weight_block_size")
    if said.get("fmt", "e4m3") != "e4m3":
        return f"fp8 of the kind {said['fmt']}"
    if blocks is None:
        return Storage(8)
    return _in_blocks(blocks) or f"fp8 in blocks of {' x '.join(map(str, blocks))}"


def _of_awq(said: Mapping[str, Any]) -> Storage | str:
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm" or said.get("backend") == "llm-awq":
        return f"awq in the layout of {version if version != 'gemm' else 'llm-awq'}"
    return _in_four_bits("awq", "awq", said.get("bits"), said.get("group_size"))


def _of_gptq(said: Mapping[str, Any]) -> Storage | str:
    layout = said.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        return f"gptq in the layout of {layout}"
    for key in ("desc_act", "dynamic", "is_marlin_format"):
        if said.get(key):
            return f"gptq with {key}"
    return _in_four_bits("gptq", layout, said.get("bits"), said.get("group_size"))


def _in_four_bits(method: str, layout: Any, bits: Any, group: Any) -> Storage | str:
    """Return the storage of 4-bit integers in groups of inputs, or what of it is not built."""
    group = 0 if group in (None, -1) else group
    if bits != 4 or group not in (0, *GROUPS):
        return f"{method} with weights of {bits} bits in groups of {group or 'all inputs'}"
    return Storage(4, layout, group)


def _in_blocks(blocks: Any) -> Storage | None:
    return Storage(8, "blocks", BLOCK) if list(blocks or ()) == [BLOCK, BLOCK] else None


def _of_compressed_tensors(said: Mapping[str, Any]) -> Storage | str:
    method = said["quant_method"]
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if said.get(key):
            return f"{method} with a {key}"
    kinds = {_of_group(said.get("format"), group) for group in said.get("config_groups", {}).values()}
    refused = sorted(kind for kind in kinds if isinstance(kind, str))
    if refused or len(kinds) != 1:
        return f"{method} {refused[0] if refused else 'with config_groups of several kinds, or without any'}"
    return kinds.pop()


def _of_group(layout: str | None, group: Mapping[str, Any]) -> Storage | str:
    """Return how the layers of one of compressed-tensors' config_groups are held, or what is not built."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    refused = f"{layout} with weights of {bits} {kind} by {strategy}"
    if inputs is not None:
        of_inputs = inputs.get("num_bits"), inputs.get("type")
        if (layout, *of_inputs) != ("float-quantized", 8, "float"):
            return f"{layout} with activations of {of_inputs[0]} {of_inputs[1]}"
    if (layout, bits, kind, weights.get("symmetric")) == ("float-quantized", 8, "float", True):
        if strategy in ("channel", "tensor"):
            return Storage(8)
        return (_in_blocks(weights.get("block_structure")) if strategy == "block" else None) or refused
    if layout == "pack-quantized" and (kind, strategy in ("group", "channel")) == ("int", True):
        if weights.get("actorder") in ("group", "dynamic"):
            return f"{layout} with actorder {weights['actorder']}"
        return _in_four_bits(layout, "packed", bits, weights.get("group_size"))
    return refused
