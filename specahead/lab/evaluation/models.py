"""What evaluation needs to know of a model, and a runner of it that captures nothing."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from specahead.config.speculation import KVCacheDtype, Quantization
from specahead.engine.loading.kv_scales import measure_kv_scales
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.steps.model_runner import ModelRunner


def load_runner(
    model: str,
    dtype: torch.dtype,
    device: str,
    kv_tokens: int,
    drafts_in_eight_bits: bool = False,
    kv_cache_dtype: KVCacheDtype = "auto",
    quantization: Quantization = "none",
    max_context: int = 0,
) -> ModelRunner:
    """Return a runner of the model with KV room for `kv_tokens` tokens in all, which captures no graphs.

    drafts_in_eight_bits: whether the passes that draft for itself read its weights in 8 bits. max_context: the most
    tokens of a sequence; 0: kv_tokens. Raises NotImplementedError for a model that this is not built for.
    """
    loaded = load_model(model, dtype, device, quantization=quantization)
    drafting = loaded.decoder.with_eight_bit_weights() if drafts_in_eight_bits else None
    scales = measure_kv_scales(loaded, load_tokenizer(model)) if kv_cache_dtype == "fp8" else None
    return make_runner(loaded, kv_tokens, 0, max_context, scales, drafting=drafting, enforce_eager=True)


def model_hash(model: str) -> str:
    """Return 16 hex digits that identify a model: a folder by config, file sizes and headers, a hub id by its name."""
    folder = Path(model)
    if not folder.is_dir():
        return hashlib.sha256(f"hub:{model}".encode()).hexdigest()[:16]
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            digest.update(f"{file.name}:{file.stat().st_size}".encode() + handle.read(65536))
    return digest.hexdigest()[:16]


def output_projections(decoder: Decoder | ModulesDecoder) -> list[Tensor]:
    """Return each layer's attention output projection, [hidden, heads * head_dim].

    Raises NotImplementedError for an architecture whose attention has none under a name that we know.
    """
    if isinstance(decoder, Decoder):
        values = (layer.out.values for layer in decoder.layers)
        return [each if isinstance(each, Tensor) else each.in_order() for each in values]
    found: dict[int, Tensor] = {}
    for module in decoder.model.modules():
        layer = getattr(module, "layer_idx", None)
        names = [name for name in ("o_proj", "out_proj", "dense", "c_proj", "wo") if hasattr(module, name)]
        if layer is not None and names:
            found[layer] = getattr(module, names[0]).weight.detach()
    if sorted(found) != list(range(decoder.num_layers)):
        name = type(decoder.model).__name__
        raise NotImplementedError(f"{name}: no output projection of attention found in every layer")
    return [found[layer] for layer in sorted(found)]
