"""Which weights in 8 bits are built: of checkpoints as they come, and of models on a device."""

from collections.abc import Mapping
from typing import Any

import torch

from specahead.engine.model.families import FAMILIES, head_dim, unbuilt_feature
from specahead.kernels.linear import BLOCK

LEAST_CAPABILITY = (8, 9)  # of GPUs that convert and multiply numbers of 8 bits (e4m3)
_BUILT = (
    "built are 8-bit floats (e4m3) with a scale for each tensor or each output channel: compressed-tensors "
    "float-quantized, and fp8 without blocks; or take the 16-bit checkpoint with --quantization fp8"
)


def holds_eight_bits(config: Any, quantization: str = "none") -> bool:
    """Return whether linear layers are held in 8 bits: by the setting `quantization`, or as the checkpoint comes.

    config: of transformers; `check_checkpoint` has passed it.
    """
    return quantization == "fp8" or bool(getattr(config, "quantization_config", None))


def check_checkpoint(model: str, said: Mapping[str, Any] | None) -> None:
    """Raise NotImplementedError, by name, for a checkpoint whose quantization is not built.

    said: the quantization_config in its config.json.
    """
    unbuilt = None if said is None else _unbuilt(said)
    if unbuilt is not None:
        raise NotImplementedError(f"{model}: its weights are quantized by {unbuilt}, which is not built; {_BUILT}")


def check_eight_bits(config: Any, dtype: torch.dtype, device: str, ranks: int = 1) -> None:
    """Raise NotImplementedError if a model of this config cannot be held in 8 bits on the device.

    ranks: over which its heads and columns are split.
    """
    reason = unbuilt_feature(config, on_gpu=device != "cpu") or unbuilt_in_eight_bits(config, dtype, device, ranks)
    if reason is None and device != "cpu" and dtype != torch.bfloat16:
        reason = f"results in {dtype} (bfloat16 is built)"
    if reason is not None:
        raise NotImplementedError(f"{config.model_type}: weights in 8 bits are not built for {reason}")


def unbuilt_in_eight_bits(config: Any, dtype: torch.dtype, device: str, ranks: int = 1) -> str | None:
    """Return why no kernel reads the layers of such a model, one of FAMILIES, in 8 bits; None if they do."""
    family = FAMILIES[config.model_type]
    if None in (family.input_norm, family.mlp_norm):
        return "layers that do not norm what attention and the MLP read"
    if device == "cpu":
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"GPUs of a compute capability below {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    of_ranks = (size // ranks for size in (config.intermediate_size, config.num_attention_heads * head_dim(config)))
    inputs = config.hidden_size, *of_ranks
    odd = [size for size in inputs if size % BLOCK]
    if odd:
        return f"layers of {odd[0]} inputs, which is no multiple of {BLOCK}"
    return "float32" if dtype == torch.float32 else None


def _unbuilt(said: Mapping[str, Any]) -> str | None:
    method = said.get("quant_method", "a method without a name")
    if method == "fp8":
        blocks = said.get("weight_block_size")
        return None if blocks is None else f"fp8 in blocks of {' x '.join(map(str, blocks))}"
    if method != "compressed-tensors":
        return str(method)
    if said.get("kv_cache_scheme"):
        return f"{method} with a kv_cache_scheme"
    if said.get("format") != "float-quantized":
        return f"{method} {said.get('format')}"
    for group in said.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        kind = [weights.get(key) for key in ("num_bits", "type", "strategy", "symmetric")]
        if kind not in ([8, "float", "channel", True], [8, "float", "tensor", True]):
            return f"{method} with weights of {' '.join(map(str, kind[:2]))} by {kind[2]}"
        inputs = group.get("input_activations")
        if inputs is not None and (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
            return f"{method} with activations of {inputs.get('num_bits')} {inputs.get('type')}"
    return None
