"""The methods that are compared: those that services know, and rivals that choose while the target runs.

A rival is asked layer by layer, while a pass runs, so only evaluation can run it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from specahead.lab.evaluation import draft_guided, just_in_time
from specahead.lab.evaluation.just_in_time import CANDIDATES, Choose
from specahead.sparsity.plan import Plan, PlanError


@dataclass(frozen=True)
class Rival:
    """A method that chooses layer by layer, while a pass runs."""

    name: str
    choose: Choose
    """Chooses the blocks that one layer reads; its docstring names the paper."""
    summaries: Callable[[Plan, int], float] = lambda plan, base: 0.0
    """Returns the tokens of KV that what a head reads beside its blocks is worth, on `base` committed tokens."""
    follows_draft: bool = False
    """Whether it needs the maps of a calibrated plan (`most_alike`)."""


def _bounds(plan: Plan, base: int) -> float:
    """Return the tokens that bounds are worth: two key vectors a block are as much as one token."""
    return float(plan.num_blocks(base))


def _bounds_and_estimates(plan: Plan, base: int) -> float:
    """Return the tokens that bounds and the candidates' 4-bit keys are worth: these are an eighth of their KV."""
    return _bounds(plan, base) + base / CANDIDATES / 8


_ALL = [
    Rival("streaming", just_in_time.streaming),
    Rival("oracle", just_in_time.oracle),
    Rival("quest", just_in_time.quest, summaries=_bounds),
    Rival("twilight", just_in_time.twilight, summaries=_bounds_and_estimates),
    Rival("tidal", just_in_time.tidal),
    Rival("sts", draft_guided.sts, follows_draft=True),
    Rival("specattn", draft_guided.specattn, follows_draft=True),
]
OURS = "dense", "ahead"  # what services run, and the same with everything read
RIVALS: dict[str, Rival] = {rival.name: rival for rival in _ALL}


def rival_of(name: str) -> Rival | None:
    """Return the rival of a name, None for a method of ours. Raises PlanError for a name that is neither."""
    if name not in OURS and name not in RIVALS:
        raise PlanError(f"sparsity method {name!r}; known are {', '.join([*OURS, *RIVALS])}")
    return RIVALS.get(name)
