"""The methods that are compared: those that services know, and rivals that choose while the target runs.

A rival looks at the queries of each layer before it chooses, so only evaluation can run it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from specahead.lab.evaluation import just_in_time
from specahead.lab.evaluation.just_in_time import CANDIDATES, Choose
from specahead.sparsity.methods import METHODS, Method, check_method
from specahead.sparsity.plan import Plan, PlanError, Rule


@dataclass(frozen=True)
class Rival:
    """A method that chooses just in time, layer by layer. Other fields are as in sparsity.methods.Method."""

    name: str
    about: str
    choose: Choose
    """Chooses the blocks that one layer reads."""
    rule: Rule = "top_k"
    summaries: Callable[[Plan, int], float] = lambda plan, base: 0.0

    def rule_of(self, plan: Plan) -> Rule:
        """Return the plan's rule, or the rival's own where the plan has none."""
        return plan.rule or self.rule


def _bounds(plan: Plan, base: int) -> float:
    """Return the tokens that bounds are worth: two key vectors a block are as much as one token."""
    return float(plan.num_blocks(base))


def _estimates(plan: Plan, base: int) -> float:
    """Return the tokens of bounds and of the candidates' keys in 4 of 16 bits, an eighth of their KV."""
    return _bounds(plan, base) + base / CANDIDATES / 8


_ALL = [
    Rival("oracle", "the target's own heaviest blocks of the round itself", just_in_time.oracle),
    Rival("quest", "bounds from minima and maxima of keys (Quest)", just_in_time.quest, summaries=_bounds),
    Rival("tidal", "anchor layers choose for later layers (TidalDecode)", just_in_time.tidal),
    Rival(
        "twilight",
        "nucleus of weights estimated from 4-bit keys (Twilight)",
        just_in_time.twilight,
        rule="top_p",
        summaries=_estimates,
    ),
]
RIVALS: dict[str, Rival] = {rival.name: rival for rival in _ALL}


def compared_method(name: str) -> Method | Rival:
    """Return the served method or the rival of a name. Raises PlanError for a name that is neither."""
    found = METHODS.get(name) or RIVALS.get(name)
    if found is None:
        raise PlanError(f"sparsity method {name!r}; known are {', '.join([*METHODS, *RIVALS])}")
    return found


def check_compared(method: Method | Rival, plan: Plan) -> None:
    """Raise PlanError where the plan does not have what the method needs."""
    if isinstance(method, Rival):
        if method.name == "tidal" and not plan.anchor_layers:
            raise PlanError("method 'tidal' needs anchor_layers in the plan; calibrate chooses them")
        if method.name == "quest" and method.rule_of(plan) == "top_p":
            raise PlanError(
                "method 'quest' has bounds, not a distribution: it takes a top_k budget, not the plan's top_p"
            )
        return
    check_method(method, plan)
    if method.shares_budget and plan.sharing not in ("pooled", "first"):
        raise PlanError(f"method {method.name!r} has one selection a round; the plan's sharing is {plan.sharing!r}")
    if plan.sharing == "per_query" and method.in_advance is not None and method.announcing is None:
        raise PlanError(f"method {method.name!r} has one selection a round; the plan's sharing is 'per_query'")
