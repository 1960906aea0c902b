"""A loaded model and its KV, as a runner."""

from typing import Any

from torch import nn

from engine.decoder import Decoder
from engine.families import read_decoder, unbuilt_feature
from engine.kv.cache import KVCache
from engine.kv.pages import PAGE_SIZE, pages_for
from engine.kv.tiered import TieredKV
from engine.loading.shape import read_shape
from engine.model_runner import MAX_OVERHANG, ModelRunner
from engine.modules import ModulesDecoder


def make_runner(
    loaded: nn.Module,
    kv_tokens: int,
    backing_tokens: int = 0,
    max_context: int = 0,
    dense_layers: tuple[int, ...] = (),
    decoder: Decoder | ModulesDecoder | None = None,
    **how: Any,
) -> ModelRunner:
    """Return a runner of a loaded model.

    kv_tokens: tokens whose KV the device has room for. backing_tokens: tokens that host memory, as its backing store,
    has room for; 0: there is none. max_context: tokens of a sequence, at most; 0: kv_tokens. dense_layers: as in
    ModelSettings. decoder: the model's, made here if None. how: the settings of ModelRunner.
    """
    max_context = max_context or kv_tokens
    kv = _make_kv(loaded, kv_tokens, backing_tokens, max_context + MAX_OVERHANG, dense_layers)
    of_weights = sum(parameter.nbytes for parameter in loaded.parameters())
    of_model = decoder or make_decoder(loaded), kv, read_shape(loaded.config).vocab_size
    return ModelRunner(*of_model, max_context, weight_bytes=of_weights, **how)


def _make_kv(
    loaded: nn.Module, kv_tokens: int, backing_tokens: int, longest: int, dense_layers: tuple[int, ...]
) -> KVCache:
    """Return empty KV of the model's sizes, dtype and device. longest: tokens of a sequence, at most"""
    shape, parameter = read_shape(loaded.config), next(loaded.parameters())
    of_model = shape.num_layers, shape.num_kv_heads, shape.head_dim
    of_weights = parameter.dtype, parameter.device
    pages = pages_for(kv_tokens)
    if not backing_tokens:
        return KVCache(*of_model, pages, *of_weights)
    backing = backing_tokens // PAGE_SIZE
    return TieredKV(*of_model, min(pages, backing), backing, longest, *of_weights, kept_layers=dense_layers)


def make_decoder(loaded: nn.Module) -> Decoder | ModulesDecoder:
    """Return the fused decoder of a loaded model, or transformers' own modules where it is not built for them."""
    config: Any = loaded.config
    if unbuilt_feature(config, on_gpu=next(loaded.parameters()).is_cuda) is None:
        return read_decoder(loaded)
    return modules_decoder(loaded)


def modules_decoder(loaded: nn.Module) -> ModulesDecoder:
    """Return a decoder that runs transformers' own modules. Raises NotImplementedError where layers scale apart."""
    config: Any = loaded.config
    shape = read_shape(config)
    modules: list[Any] = list(loaded.modules())
    scales = {float(m.scaling) for m in modules if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    if len(scales) > 1:
        raise NotImplementedError(f"{config.model_type}: layers scale attention by {sorted(scales)}, not all alike")
    scale = scales.pop() if scales else shape.head_dim**-0.5
    return ModulesDecoder(loaded, shape.num_layers, shape.num_heads, shape.num_kv_heads, scale, shape.vocab_size)
