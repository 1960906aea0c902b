"""The methods that are compared: those that services know, and rivals that choose while the target runs.

A rival looks at the queries of each layer before it chooses, so only evaluation can run it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from specahead.lab.evaluation import just_in_time
from specahead.lab.evaluation.just_in_time import Choose
from specahead.sparsity.plan import Plan, PlanError


@dataclass(frozen=True)
class Rival:
    """A method that chooses just in time, layer by layer."""

    name: str
    about: str
    """A description for people."""
    choose: Choose
    """Chooses the blocks that one layer reads."""
    summaries: Callable[[Plan, int], float] = lambda plan, base: 0.0
    """Returns the tokens of KV that what a head reads beside its blocks is worth, on `base` committed tokens."""


def _bounds(plan: Plan, base: int) -> float:
    """Return the tokens that bounds are worth: two key vectors a block are as much as one token."""
    return float(plan.num_blocks(base))


_ALL = [
    Rival("streaming", "sinks and a window (StreamingLLM)", just_in_time.streaming),
    Rival("oracle", "the target's own heaviest blocks of the round itself", just_in_time.oracle),
    Rival("quest", "bounds from minima and maxima of keys (Quest)", just_in_time.quest, summaries=_bounds),
]
OURS = "dense", "ahead"  # what services run, and the same with everything read
RIVALS: dict[str, Rival] = {rival.name: rival for rival in _ALL}


def rival_of(name: str) -> Rival | None:
    """Return the rival of a name, None for a method of ours. Raises PlanError for a name that is neither."""
    if name not in OURS and name not in RIVALS:
        raise PlanError(f"sparsity method {name!r}; known are {', '.join([*OURS, *RIVALS])}")
    return RIVALS.get(name)
