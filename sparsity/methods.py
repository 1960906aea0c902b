"""The sparsity methods by name: what each needs, what it announces, how it chooses."""

from collections.abc import Callable
from dataclasses import dataclass

from sparsity import announce, in_advance, just_in_time
from sparsity.announce import LEAST_WINDOW, Announcing, summary_tokens
from sparsity.in_advance import InAdvance
from sparsity.just_in_time import CANDIDATES, Choose
from sparsity.plan import Plan, PlanError, Rule, load_plan, overridden


@dataclass(frozen=True)
class Method:
    """Exactly one of in_advance and just_in_time, or neither: then everything is read.

    rule: of its budget, unless the plan says otherwise. announcing: what its draft sends, None if nothing. window:
    blocks always read before the committed end, None for the plan's. remembers: wants the weights of what was read.
    stands_in: group means stand in for the rest. summaries: (plan, base) -> tokens of KV that a sparse head reads
    beside its blocks.
    """

    name: str
    about: str
    rule: Rule = "top_k"
    announcing: Announcing | None = None
    in_advance: InAdvance | None = None
    just_in_time: Choose | None = None
    window: int | None = None
    remembers: bool = False
    stands_in: bool = False
    summaries: Callable[[Plan, int], float] = lambda plan, base: 0.0

    def rule_of(self, plan: Plan) -> Rule:
        return plan.rule or self.rule

    def uses_means(self, plan: Plan) -> bool:
        return self.stands_in and plan.group_size > 0 and plan.budget < 1


def _bounds(plan: Plan, base: int) -> float:
    """Two key vectors a block, as much as one token."""
    return float(plan.num_blocks(base))


def _estimates(plan: Plan, base: int) -> float:
    """Bounds, and the candidates' keys in 4 of 16 bits: an eighth of their KV."""
    return _bounds(plan, base) + base / CANDIDATES / 8


_ALL = [
    Method("dense", "reads everything"),
    Method(
        "oracle", "the target's own heaviest blocks of the round itself", just_in_time=just_in_time.oracle
    ),
    Method("streaming", "sinks and a window (StreamingLLM)", in_advance=in_advance.streaming),
    Method(
        "quest",
        "bounds from minima and maxima of keys (Quest)",
        just_in_time=just_in_time.quest,
        summaries=_bounds,
    ),
    Method("tidal", "anchor layers choose for later layers (TidalDecode)", just_in_time=just_in_time.tidal),
    Method(
        "twilight",
        "nucleus of weights estimated from 4-bit keys (Twilight)",
        rule="top_p",
        just_in_time=just_in_time.twilight,
        summaries=_estimates,
    ),
    Method(
        "pillar",
        "what the last verification weighed most (SparseSpec)",
        in_advance=in_advance.pillar,
        remembers=True,
    ),
    Method(
        "sts",
        "top blocks of the draft head that is most alike (STS)",
        announcing=announce.BY_DRAFT_HEAD,
        in_advance=in_advance.announced,
    ),
    Method(
        "specattn",
        "nucleus of the draft layer that is most alike (SpecAttn)",
        rule="top_p",
        announcing=announce.BY_DRAFT_LAYER,
        in_advance=in_advance.announced,
    ),
    Method(
        "ahead",
        "draft and own weights under one budget for all heads, group means for the rest",
        announcing=announce.BY_TARGET_HEAD,
        in_advance=in_advance.ahead,
        window=LEAST_WINDOW,
        remembers=True,
        stands_in=True,
        summaries=summary_tokens,
    ),
]
METHODS: dict[str, Method] = {method.name: method for method in _ALL}


def method_named(name: str) -> Method:
    """Raises PlanError for a name that is none."""
    try:
        return METHODS[name]
    except KeyError:
        raise PlanError(f"sparsity method {name!r}; known are {', '.join(METHODS)}") from None


def check_method(method: Method, plan: Plan) -> None:
    """Raises PlanError where the plan does not have what the method needs."""
    if method.name == "tidal" and not plan.anchor_layers:
        raise PlanError("method 'tidal' needs anchor_layers in the plan")
    rule = method.rule_of(plan)
    if rule == "top_p" and method.name in ("quest", "ahead", "streaming"):
        raise PlanError(f"method {method.name!r} takes a top_k budget, the plan's rule is top_p")
    if method.name == "ahead" and plan.sharing not in ("pooled", "first"):
        raise PlanError(f"method 'ahead' has one selection a round; the plan's sharing is {plan.sharing!r}")
    if plan.sharing == "per_query" and method.in_advance in (in_advance.pillar, in_advance.streaming):
        raise PlanError(
            f"method {method.name!r} has one selection a round; the plan's sharing is 'per_query'"
        )


def check_served(plan: Plan) -> None:
    """Raises PlanError for a plan that evaluation can use and services cannot."""
    check_method(method_named(plan.method), plan)
    if plan.sharing == "per_query" and any(method.announcing for method in METHODS.values()):
        raise PlanError("sharing 'per_query' is for evaluation: an announcement holds one selection a round")


def load_served_plan(file: str, budget: float, method: str) -> Plan:
    """A plan that services can use, with another budget or method unless they are 0 and "". Raises PlanError."""
    plan = overridden(load_plan(file), budget, method)
    check_served(plan)
    return plan


def methods_of(plan: Plan) -> list[str]:
    """The names that this plan allows."""
    allowed = []
    for name, method in METHODS.items():
        try:
            check_method(method, plan)
        except PlanError:
            continue
        allowed.append(name)
    return allowed
