"""Decides whether each target's process runs the draft model too, and how many targets there are. Knows no Ray."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from specahead.config import Config, SettingsError
from specahead.engine.loading.config import load_config, read_shape
from specahead.engine.loading.memory import bytes_of_token, bytes_of_weights
from specahead.engine.loading.model import resolve_dtype
from specahead.engine.model.head_config import is_head
from specahead.engine.model.quantization import storage_of

log = logging.getLogger(__name__)

_TARGETS_A_DRAFT = 3  # that one draft service on a GPU of its own keeps up with
# GiB of memory by the name that Ray gives to a node's accelerator.
_MEMORY = {
    **{"T4": 16, "V100": 16, "A10G": 24, "L4": 24, "A100": 40, "A100-40G": 40, "L40S": 48, "A100-80G": 80},
    **{"H100": 80, "GH200": 96, "H200": 141, "B200": 180},
}


@dataclass(frozen=True)
class Machine:
    """The GPUs that Ray has."""

    gpus: int
    """How many there are."""
    memory: float = 0.0
    """Bytes of the smallest; 0: not known."""


@dataclass(frozen=True)
class PairSizes:
    """Bytes of a target and its draft."""

    weights: int
    """Of the target."""
    draft_weights: int
    """Of the draft."""
    token: int
    """KV of a token of the target."""
    draft_token: int
    """KV of a token of the draft."""
    has_head: bool = False
    """Whether the draft is a head, which reads the target's hidden states."""


@dataclass(frozen=True)
class Choice:
    """How the services are placed."""

    together: bool
    """Whether each target's process runs the draft model as well."""
    targets: int
    """Target services."""
    drafts: int
    """Draft services, if there is a draft model and it does not run together with the target."""
    why: str
    """The reason, in words."""

    @property
    def in_words(self) -> str:
        """The choice and its reason."""
        targets = f"{self.targets} target{'s' * (self.targets > 1)}"
        drafts = f"{self.drafts} draft{'s' * (self.drafts > 1)}"
        how = (
            "with a draft each" if self.together else f"and {drafts} apart" if self.drafts else "without a draft model"
        )
        return f"{targets} {how}" + (f", since {self.why}" if self.together or self.drafts else "")


def choose(config: Config, machine: Machine, sizes: PairSizes | None) -> Choice:
    """Return how the services are placed. sizes: None without a draft model. Pure."""
    cluster, target = config.cluster, config.target
    gpus = machine.gpus if target.device != "cpu" else 0
    grows, ranks = cluster.autoscaling.max_targets > 0, target.tensor_parallel_size
    alone = cluster.targets or (1 if grows or target.host_kv_memory else max(1, gpus // ranks))
    asked = "the settings ask for it"
    together, few = Choice(True, alone, 0, asked), Choice(False, cluster.targets or 1, cluster.drafts or 1, asked)
    # The fewest drafts that keep up with the targets on all other GPUs.
    drafts = math.ceil(gpus / (_TARGETS_A_DRAFT * ranks + 1)) if gpus > 1 else 1
    filled = 1 if grows or gpus < 2 else max(1, (gpus - drafts) // ranks)
    many = Choice(False, cluster.targets or filled, cluster.drafts or drafts, asked)
    if sizes is None:
        return Choice(False, alone, 0, "there is no draft model")
    if sizes.has_head and target.placement == "apart":
        raise SettingsError(
            f"placement 'apart': {target.draft} is a head, which reads the target's hidden states in its process: "
            "give 'together' or 'auto'"
        )
    if sizes.has_head and target.placement == "auto":
        return replace(together, why="a head drafts in its target's process")
    if target.placement != "auto":
        return together if target.placement == "together" else many
    for why, holds in {
        # On a CPU both shapes cost the same, and two processes use two cores.
        "there is no GPU": gpus == 0,
        "the target's KV lies in host memory": target.host_kv_memory > 0,
        "draft services are asked for": cluster.drafts > 0,
        "nodes for drafts are named": cluster.node_resources.draft != "",
    }.items():
        if holds:
            return replace(few, why=why)
    if ranks > 1:
        return replace(together, why="the first GPU of each target holds its draft, too")
    if gpus == 1 or not machine.memory:
        return replace(together, why="each GPU holds a target and its draft")
    fits, why = _compare_room(config, machine, sizes, gpus, gpus - drafts)
    return replace(together if fits else many, why=why)


def _compare_room(config: Config, machine: Machine, sizes: PairSizes, gpus: int, beside: int) -> tuple[bool, str]:
    """Return whether KV has room enough beside both models, and the rooms in words.

    gpus: that hold a target and a draft each, together. beside: that hold a target each, apart.
    """
    target = config.target
    usable = target.gpu_memory_utilization * machine.memory
    room = max(0, int((usable - sizes.weights - sizes.draft_weights) // (sizes.token + sizes.draft_token)))
    alone = max(0, int((usable - sizes.weights) // sizes.token))
    why = f"{room} tokens of KV fit beside both models, {alone} beside the target alone"
    whole = room >= target.max_sessions * target.max_context
    # Together is so much faster that it may take half of the room.
    return whole or (room >= target.max_context and 2 * room * gpus >= alone * beside), why


def with_choice(config: Config, machine: Machine) -> tuple[Config, Choice]:
    """Return the settings of a launch with placement, targets and drafts chosen, and the choice."""
    chosen = choose(config, machine, _sizes_of(config, machine))
    log.info(
        "placement: %s",
        "together" if chosen.together else "apart" if chosen.drafts else "targets alone",
        extra={"targets": chosen.targets, "drafts": chosen.drafts, "why": chosen.why},
    )
    placement: Literal["together", "apart"] = "together" if chosen.together else "apart"
    cluster = replace(config.cluster, targets=chosen.targets, drafts=max(1, chosen.drafts))
    return replace(config, target=replace(config.target, placement=placement), cluster=cluster), chosen


def _sizes_of(config: Config, machine: Machine) -> PairSizes | None:
    if not config.draft.has_draft:
        return None
    sizes = []
    for side in (config.target, config.draft):
        dtype = resolve_dtype(config.target.dtype, "cuda" if machine.gpus else "cpu", side.model)
        read = load_config(side.model)
        weights = bytes_of_weights(read, dtype, storage_of(read, side.quantization))
        sizes.append((weights, bytes_of_token(read_shape(read), dtype, config.target.kv_cache_dtype)))
    (weights, token), (draft_weights, draft_token) = sizes
    return PairSizes(weights, draft_weights, token, draft_token, is_head(read))


def machine_of(resources: Mapping[str, float]) -> Machine:
    """Return the GPUs that Ray has, by its resources."""
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    known = [_MEMORY[kind] * 2**30 for kind in kinds if kind in _MEMORY]
    return Machine(int(resources.get("GPU", 0)), min(known) if len(known) == len(kinds) and known else 0.0)
