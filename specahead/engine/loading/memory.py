"""How many tokens of KV there is room for: on the device, and in host memory where that is the backing store."""

import logging
import math
from collections.abc import Mapping

import torch

from specahead.config import ModelSettings
from specahead.engine.kv.pages import KEPT_SHARE, PAGE_SIZE
from specahead.engine.loading.free_memory import free_memory
from specahead.engine.loading.shape import ModelShape
from specahead.engine.steps.model_runner import MAX_OVERHANG

log = logging.getLogger(__name__)

DEFAULT_KV_TOKENS = 131072  # on a CPU
ACTIVATION_BYTES = 2 << 30  # left free on a GPU beside weights and KV


def check_memory(settings: ModelSettings, shape: ModelShape, parameters: int, dtype: torch.dtype, device: str) -> None:
    """Raise ValueError for settings that ask for more memory than there is beside the weights. To be called before
    these are loaded, and only as good as what they are known to take.

    On a CPU KV takes memory when it is written, so that nothing else would refuse it until requests come.
    """
    if settings.kv_tokens:
        of_kv = {f"{settings.kv_tokens} tokens of KV": float(settings.kv_tokens * bytes_of_token(shape, dtype))}
    else:
        of_kv = {"kv_memory": settings.kv_memory * 2**30}
    of_host = {"host_kv_memory": settings.host_kv_memory * 2**30}
    weights = parameters * dtype.itemsize
    if device == "cpu":
        _check_fits(settings.model, of_kv | of_host, weights, device)
    else:
        _check_fits(settings.model, of_kv, weights, device)
        _check_fits(settings.model, of_host, 0, "cpu")


def _check_fits(model: str, asked: Mapping[str, float], weights: int, device: str) -> None:
    """Raise ValueError if what is asked for, in bytes by name, is more than there is beside the weights, in bytes."""
    wanted = {name: size for name, size in asked.items() if size}
    free = free_memory(device)
    if wanted and sum(wanted.values()) + weights > free:
        sizes = " and ".join(f"{name} of {size / 2**30:.1f} GiB" for name, size in wanted.items())
        where = "this machine has" if device == "cpu" else "the GPU has"
        beside = f", its weights take {weights / 2**30:.1f} GiB" if weights else ""
        raise ValueError(f"{model}: asked for {sizes}{beside}, and {where} {free / 2**30:.1f} GiB free: ask for less")


def room_for_kv(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype, device: str, beside: int = 0) -> int:
    """Return the tokens of KV to make room for on the device, once the weights are loaded; log it for a GPU.

    beside: bytes that each of these tokens takes in another model, too, out of the same memory.
    Raises ValueError if not even one sequence of max_context fits.
    """
    if settings.kv_tokens:
        return settings.kv_tokens
    context = context_of(settings, shape)
    if device == "cpu" and not settings.kv_memory:
        return max(DEFAULT_KV_TOKENS, settings.max_context + PAGE_SIZE)
    a_token = bytes_of_token(shape, dtype) + beside
    memory = _device_memory(settings, device)
    if settings.host_kv_memory:
        memory -= _bytes_beside_pages(settings, shape, dtype)
        a_token = _bytes_in_tiers(settings, shape, dtype)
    most = math.ceil(settings.max_sessions * (context + 2 * PAGE_SIZE) / (1 - KEPT_SHARE))
    tokens = min(max(0, int(memory / a_token)), most)
    if device != "cpu":
        weights = torch.cuda.memory_allocated(device)
        sizes = {"weights_gib": weights / 2**30, "kv_gib": tokens * a_token / 2**30, "kv_tokens": tokens}
        log.info("the model is loaded", extra={"model": settings.model, **sizes})
    if tokens < context and not settings.host_kv_memory:
        raise ValueError(
            f"{settings.model}: KV for {tokens} tokens fits, a context has {context}: lower max_context, or raise "
            "kv_memory or gpu_memory_utilization"
        )
    return tokens


def backing_store_tokens(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the tokens of KV that host memory holds as the backing store; 0 if there is none.

    Raises ValueError if the plan leaves no layer whose KV would lie there.
    """
    memory = settings.host_kv_memory
    return int(memory * 2**30 / _bytes_in_tiers(settings, shape, dtype)) if memory else 0


def context_of(settings: ModelSettings, shape: ModelShape) -> int:
    """Return the tokens of the longest context."""
    return settings.max_context or shape.max_position_embeddings


def _device_memory(settings: ModelSettings, device: str) -> float:
    """Return the bytes that KV, and what belongs to it, may take on the device."""
    if settings.kv_memory:
        return settings.kv_memory * 2**30
    free, total = torch.cuda.mem_get_info(device)
    return free - (1 - settings.gpu_memory_utilization) * total - ACTIVATION_BYTES


def bytes_of_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """Return what the KV of a token takes."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _bytes_in_tiers(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of a token in the layers whose KV has a backing store. Raises ValueError if there are none."""
    layers = shape.num_layers - len(settings.dense_layers)
    if layers < 1:
        raise ValueError(
            f"{settings.model}: the plan reads all {shape.num_layers} layers wholly, so their KV stays: leave "
            "host_kv_memory out"
        )
    return bytes_of_token(shape, dtype) // shape.num_layers * layers


def _bytes_beside_pages(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype) -> float:
    """Return the bytes that KV with a backing store takes on the device beside its GPU pages.

    These are two layers of one sequence, where passes that read everything bring it together; the layers that stay on
    the device; the tables that say where each page of the others lies; and group means.
    """
    of_layer, backing = (bytes_of_token(shape, dtype) / shape.num_layers, backing_store_tokens(settings, shape, dtype))
    heads = shape.num_layers * shape.num_kv_heads
    tables = backing / PAGE_SIZE * heads * (4 + 10)  # of a page and, at most, of a cache line
    means = 3 * 4 * backing / settings.group_size * heads * shape.head_dim if settings.group_size else 0.0
    staged = 2 * (context_of(settings, shape) + MAX_OVERHANG) * of_layer
    return staged + len(settings.dense_layers) * backing * of_layer + tables + means
