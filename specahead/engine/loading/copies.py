"""Chooses which passes of a service read a second copy of the weights in 8 bits, where its settings leave that open."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from specahead.config import DraftSettings, TargetSettings
from specahead.engine.loading.config import load_config, read_shape
from specahead.engine.loading.memory import ACTIVATION_BYTES, bytes_of_token, bytes_of_weights
from specahead.engine.loading.model import resolve_dtype
from specahead.engine.model.families import count_experts, count_parameters, unbuilt_feature
from specahead.engine.model.head_config import is_head
from specahead.engine.model.quantization import Storage, storage_of, unbuilt_in

log = logging.getLogger(__name__)

QUANTIZATION_KEYS = ("draft_quantization", "screening_quantization")
MOST_OF_KV = 1 / 4  # of the memory that weights leave: beyond that, room for KV is worth more than copies


Settings = TypeVar("Settings", TargetSettings, DraftSettings)


def choose_copies(settings: Settings) -> Settings:
    """Return the settings with "fp8" or "none" for each quantization that they leave open.

    A copy is made where passes that a later pass judges can read it, the GPU converts 8 bits, and memory allows; none
    of weights that are held in 8 or 4 bits. The device of the settings must be known.
    Raises what transformers raises for a config that it cannot read.
    """
    said, sizes = settings.speculation, dict[str, int]()
    chosen: dict[str, Any] = {name: getattr(said, name) or "none" for name in QUANTIZATION_KEYS}
    for name, model in _read_by(settings).items():
        config, ranks, is_open = load_config(model), _ranks_of(settings, model), getattr(said, name) is None
        if _storage_of(settings, model).bits < 16:
            chosen[name] = "none"
        elif is_open and not is_head(config) and can_copy(config, settings.dtype, settings.device, model, ranks):
            sizes[name] = count_parameters(config) // ranks
    made = fitting(sizes, *_memory(settings)) if sizes else []
    chosen |= dict.fromkeys(made, "fp8")
    if sizes:
        log.info("chose 8-bit copies of weights", extra={**chosen, "gib": sum(sizes[name] for name in made) / 2**30})
    return replace(settings, speculation=replace(said, **chosen))


def can_copy(config: Any, dtype: str, device: str, model: str, ranks: int) -> bool:
    """Return whether the device reads 8-bit copies of a model's layers. They are not built for mixtures of experts.

    config: of transformers. dtype: as settings name it. ranks: over which the model is split.
    """
    if not device.startswith("cuda") or unbuilt_feature(config, on_gpu=True) or count_experts(config):
        return False
    return unbuilt_in(Storage(8), config, resolve_dtype(dtype, device, model), device, ranks) is None


def fitting(sizes: Mapping[str, int], left: float, asked: float) -> list[str]:
    """Return which copies are made, in the order of `sizes`, which gives the bytes of each.

    left: bytes that the weights leave for KV and copies; asked: bytes of KV that the settings ask for, 0 if the KV
    takes all memory that is left.
    """
    room = left - asked if asked else MOST_OF_KV * left
    made = []
    for name, size in sizes.items():
        if size <= room:
            made.append(name)
            room -= size
    return made


def _storage_of(settings: TargetSettings | DraftSettings, model: str) -> Storage:
    """Return how the linear layers of a model of this process are held."""
    return storage_of(load_config(model), settings.quantization if model == settings.model else "none")


def _read_by(settings: TargetSettings | DraftSettings) -> dict[str, str]:
    """Return whose weights passes of this process would read in 8 bits: models by key of the speculation."""
    if isinstance(settings, DraftSettings):
        return {"draft_quantization": settings.model}
    read = {}
    if settings.drafts_for_itself:
        read["draft_quantization"] = settings.model
    elif settings.draft_in_target:
        read["draft_quantization"] = settings.draft
    if settings.chosen.hold != 0 and not settings.deterministic:
        read["screening_quantization"] = settings.model
    return read


def _ranks_of(settings: TargetSettings | DraftSettings, model: str) -> int:
    """Return over how many GPUs a model of this process is split."""
    return settings.tensor_parallel_size if model == settings.model else 1


def _memory(settings: TargetSettings | DraftSettings) -> tuple[float, float]:
    """Return how many bytes the weights of the process leave, and how many of KV the settings ask for."""
    free, total = torch.cuda.mem_get_info(settings.device)
    left = free - (1 - settings.gpu_memory_utilization) * total - ACTIVATION_BYTES
    beside = [settings.draft] if isinstance(settings, TargetSettings) and settings.draft_in_target else []
    asked = settings.kv_memory * 2**30
    for model in [settings.model, *beside]:
        config, dtype = load_config(model), resolve_dtype(settings.dtype, settings.device, model)
        ranks, kv_dtype = _ranks_of(settings, model), settings.kv_cache_dtype
        left -= bytes_of_weights(config, dtype, _storage_of(settings, model), ranks)
        asked += settings.kv_tokens * bytes_of_token(read_shape(config).of_rank(ranks), dtype, kv_dtype)
    return left, asked
