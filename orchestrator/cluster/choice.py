"""Whether each target's process runs the draft model as well, and how many targets there are. Ray is not known here."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from specahead.config import Config
from specahead.engine.loading.config import load_config
from specahead.engine.loading.memory import bytes_of_token
from specahead.engine.loading.model import resolve_dtype
from specahead.engine.loading.shape import load_shape
from specahead.engine.model.families import count_parameters

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


@dataclass(frozen=True)
class Choice:
    """How the services of one model are placed."""

    together: bool
    """Whether each target's process runs the draft model as well."""
    targets: int
    """Target services."""
    drafts: int
    """Draft services, if there is a draft model and it does not run together with the target."""
    why: str
    """The reason, in words."""


def choose(config: Config, machine: Machine, sizes: PairSizes | None, models: int = 1) -> Choice:
    """Return how the services of a model are placed. Pure.

    sizes: None where there is no draft model. models: how many models share the machine's GPUs.
    """
    cluster, target = config.cluster, config.target
    gpus = machine.gpus // models if target.device != "cpu" else 0
    scales = cluster.autoscaling.max_targets > 0
    drafts = cluster.drafts or 1

    def apart(why: str, fills: bool = False) -> Choice:
        given = cluster.targets or (gpus - _drafts_for(gpus) if fills and not scales else 1)
        return Choice(False, given, _drafts_for(gpus) if fills and not cluster.drafts else drafts, why)

    alone = cluster.targets or (1 if scales or target.host_kv_memory else max(1, gpus))
    if sizes is None:
        return Choice(False, alone, 0, "there is no draft model")
    if target.placement != "auto":
        together = target.placement == "together"
        return Choice(True, alone, 0, "as asked") if together else apart("as asked", gpus > 1)
    if gpus == 0:
        # On a CPU both shapes cost the same, and two processes use two cores.
        return apart("no GPU is left for it")
    for reason, holds in {
        "the target's KV lies in host memory": target.host_kv_memory > 0,
        "draft services are asked for": cluster.drafts > 0,
        "nodes for drafts are named": cluster.node_resources.draft != "",
    }.items():
        if holds:
            return apart(reason)
    if gpus == 1 or not machine.memory:
        return Choice(True, alone, 0, "each GPU holds a target and its draft")
    usable = target.gpu_memory_utilization * machine.memory
    room = (usable - sizes.weights - sizes.draft_weights) // (sizes.token + sizes.draft_token)
    room_apart = (usable - sizes.weights) // sizes.token
    of_both = (
        f"{max(0, round(room))} tokens of KV fit beside both models, {max(0, round(room_apart))} beside the target"
    )
    beside_each, longest = gpus - _drafts_for(gpus), target.max_context
    if room >= target.max_sessions * longest or longest <= room and 2 * room * gpus >= room_apart * beside_each:
        return Choice(True, alone, 0, of_both)
    return apart(of_both, fills=True)


def _drafts_for(gpus: int) -> int:
    """Return how many of the GPUs run draft services where targets have GPUs of their own."""
    return math.ceil(gpus / (_TARGETS_A_DRAFT + 1))


def with_choice(config: Config, machine: Machine) -> Config:
    """Return the settings of a launch with placement, targets and drafts chosen, for each of its models."""
    if config.several:
        several = tuple(_chosen(model, machine, len(config.several)) for model in config.several)
        return replace(several[0], several=several)
    return _chosen(config, machine, 1)


def _chosen(config: Config, machine: Machine, models: int) -> Config:
    chosen = choose(config, machine, _sizes_of(config, machine), models)
    log.info(
        "placement: %s",
        "together" if chosen.together else "apart" if chosen.drafts else "targets alone",
        extra={"targets": chosen.targets, "drafts": chosen.drafts, "why": chosen.why},
    )
    placement = "together" if chosen.together else "apart"
    cluster = replace(config.cluster, targets=chosen.targets, drafts=max(1, chosen.drafts))
    return replace(config, target=replace(config.target, placement=placement), cluster=cluster)


def _sizes_of(config: Config, machine: Machine) -> PairSizes | None:
    if not config.draft.has_draft:
        return None
    sizes = []
    for model in (config.target.model, config.draft.model):
        dtype = resolve_dtype(config.target.dtype, "cuda" if machine.gpus else "cpu", model)
        sizes.append((count_parameters(load_config(model)) * dtype.itemsize, bytes_of_token(load_shape(model), dtype)))
    (weights, token), (draft_weights, draft_token) = sizes
    return PairSizes(weights, draft_weights, token, draft_token)


def machine_of(resources: Mapping[str, float]) -> Machine:
    """Return the GPUs that Ray has, by its resources."""
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    known = [_MEMORY[kind] * 2**30 for kind in kinds if kind in _MEMORY]
    return Machine(int(resources.get("GPU", 0)), min(known) if len(known) == len(kinds) and known else 0.0)
