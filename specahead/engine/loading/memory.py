"""Free memory of the host and of a GPU, and how many tokens of KV fit: on the device, and in a backing store."""

import contextlib
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specahead.config import ModelSettings
from specahead.config.speculation import KVCacheDtype
from specahead.engine.kv.pages import KEPT_SHARE, PAGE_SIZE
from specahead.engine.loading.config import ModelShape
from specahead.engine.model.families import count_parameters
from specahead.engine.model.head_config import count_head_parameters, is_head
from specahead.engine.model.quantization import Storage
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.engine.steps.grouping import MAX_OVERHANG
from specahead.kernels.kv_scales import EIGHT_BITS

log = logging.getLogger(__name__)

DEFAULT_KV_TOKENS = 131072  # on a CPU
ACTIVATION_BYTES = 2 << 30  # that stay free on a GPU beside weights and KV
# For each version of cgroups: the folder of a container's files; the names of its limit and its use; and the name, in
# memory.stat, of the part of that use which the system can drop.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(device: str = "cpu") -> int:
    """Return the free bytes of a GPU; of a CPU those of the machine, or of the container if it has fewer."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    free = [_free_in_machine()]
    for folder, limit, usage, droppable in _CGROUPS:
        # The files are missing, or say "max", where there is no such cgroup or no limit.
        with contextlib.suppress(OSError, ValueError, KeyError):
            used = int(Path(folder, usage).read_text()) - _read_numbers(Path(folder, "memory.stat"))[droppable]
            free.append(int(Path(folder, limit).read_text()) - used)
    return max(0, min(free))


def _free_in_machine() -> int:
    try:
        return _read_numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except (OSError, KeyError):  # systems other than Linux, which say only how much memory there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_numbers(file: Path) -> dict[str, int]:
    """Return the number that follows the first word of each line."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def check_memory(settings: ModelSettings, shape: ModelShape, weights: int, dtype: torch.dtype, device: str) -> None:
    """Raise ValueError for settings that ask for more memory than is free beside the weights, before these are loaded.

    weights: bytes of the model, about. On a CPU KV takes memory when it is written: without this check nothing would
    refuse it before requests come.
    """
    tokens, a_token = settings.kv_tokens, bytes_of_token(shape, dtype, settings.kv_cache_dtype)
    of_kv = {f"{tokens} tokens of KV": float(tokens * a_token)} if tokens else {"kv_memory": settings.kv_memory * 2**30}
    of_host = {"host_kv_memory": settings.host_kv_memory * 2**30}
    if device == "cpu":
        _check_fits(settings.model, of_kv | of_host, weights, device)
    else:
        _check_fits(settings.model, of_kv, weights, device)
        _check_fits(settings.model, of_host, 0, "cpu")


def _check_fits(model: str, asked: Mapping[str, float], weights: int, device: str) -> None:
    """Raise ValueError if the sizes in `asked`, in bytes by name, do not fit beside the weights, in bytes."""
    wanted = {name: size for name, size in asked.items() if size}
    free = free_memory(device)
    if wanted and sum(wanted.values()) + weights > free:
        sizes = " and ".join(f"{name} of {size / 2**30:.1f} GiB" for name, size in wanted.items())
        where = "this machine has" if device == "cpu" else "the GPU has"
        beside = f", its weights take {weights / 2**30:.1f} GiB" if weights else ""
        raise ValueError(f"{model}: asked for {sizes}{beside}, and {where} {free / 2**30:.1f} GiB free: ask for less")


def room_for_kv(
    settings: ModelSettings, shape: ModelShape, dtype: torch.dtype, device: str, beside: int = 0, ranks: Ranks = ALONE
) -> int:
    """Return how many tokens of KV to allocate on the device, once the weights are loaded; log it for a GPU.

    beside: bytes that each token takes besides, in another model that shares the memory. ranks: that run the model
    together, and call this at once. Where `settings` leave the number open, all get that of the rank with the least.
    Raises ValueError, on all ranks, if not even one sequence of max_context fits.
    """
    if settings.kv_tokens:
        return settings.kv_tokens
    context = context_of(settings, shape)
    if device == "cpu" and not settings.kv_memory:
        return max(DEFAULT_KV_TOKENS, settings.max_context + PAGE_SIZE)
    memory, a_token = _device_memory(settings, device), bytes_of_token(shape, dtype, settings.kv_cache_dtype) + beside
    if settings.host_kv_memory:
        memory -= _bytes_beside_pages(settings, shape, dtype)
        a_token = _bytes_in_pages(shape, dtype, settings.kv_cache_dtype)
    most = math.ceil(settings.max_sessions * (context + 2 * PAGE_SIZE) / (1 - KEPT_SHARE))
    tokens = ranks.least(min(max(0, int(memory / a_token)), most))
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
    """Return how many tokens of KV the backing store in host memory holds; 0 if there is none.

    shape: that of one rank. Each rank has an equal part of the memory.
    """
    part = settings.host_kv_memory * 2**30 / settings.tensor_parallel_size
    return int(part / _bytes_in_pages(shape, dtype, settings.kv_cache_dtype))


def context_of(settings: ModelSettings, shape: ModelShape) -> int:
    """Return how many tokens the longest context has."""
    return settings.max_context or shape.max_position_embeddings


def _device_memory(settings: ModelSettings, device: str) -> float:
    """Return how many bytes KV and its tables may take on the device."""
    if settings.kv_memory:
        return settings.kv_memory * 2**30
    free, total = torch.cuda.mem_get_info(device)
    return free - (1 - settings.gpu_memory_utilization) * total - ACTIVATION_BYTES


def bytes_of_weights(config: Any, dtype: torch.dtype, held: Storage, ranks: int = 1) -> int:
    """Return about how many bytes the weights of a model take on each of so many ranks.

    held: how linear layers are; embedding and head stay in the dtype, whole on each rank.
    """
    parameters = count_head_parameters(config) if is_head(config) else count_parameters(config)
    if held.bits == 16 and ranks == 1:
        return parameters * dtype.itemsize
    whole = int(config.vocab_size * config.hidden_size) * (1 if config.tie_word_embeddings else 2)
    return int((parameters - whole) / ranks * held.bytes_of_weight(dtype)) + whole * dtype.itemsize


def bytes_of_token(shape: ModelShape, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> int:
    """Return how many bytes the KV of a token takes, with its share of the mean keys of pages, if there are such.

    dtype: the model's.
    """
    return _bytes_in_pages(shape, dtype, kv_cache_dtype) + _bytes_of_means(shape, dtype)


def _bytes_in_pages(shape: ModelShape, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype) -> int:
    size = EIGHT_BITS.itemsize if kv_cache_dtype == "fp8" else dtype.itemsize
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size


def _bytes_of_means(shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of a token's share of its page's mean keys (kernels.page_means)."""
    return _bytes_in_pages(shape, dtype, "auto") // (2 * PAGE_SIZE) if shape.chooses_blocks else 0


def _bytes_beside_pages(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype) -> float:
    """Return how many bytes KV with a backing store takes on the device beside its GPU pages.

    They hold two layers of one sequence, which dense passes bring together, the tables that say where each page lies,
    the group means, and the mean keys of all pages.
    """
    of_layer = _bytes_in_pages(shape, dtype, settings.kv_cache_dtype) / shape.num_layers
    backing = backing_store_tokens(settings, shape, dtype)
    heads = shape.num_layers * shape.num_kv_heads
    tables = backing / PAGE_SIZE * heads * (4 + 10)  # of a page and, at most, of a cache line
    means = 3 * 4 * backing / settings.group_size * heads * shape.head_dim if settings.group_size else 0.0
    staged = 2 * (context_of(settings, shape) + MAX_OVERHANG) * of_layer
    return staged + tables + means + backing * _bytes_of_means(shape, dtype)
