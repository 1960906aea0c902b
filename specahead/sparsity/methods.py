"""The served sparsity methods by name: what each needs, what it announces, how it chooses."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from specahead.engine.loading.config import load_shape
from specahead.sparsity import announce, in_advance
from specahead.sparsity.announce import LEAST_WINDOW, Announcing, summary_tokens
from specahead.sparsity.in_advance import InAdvance
from specahead.sparsity.plan import ALL_TOKENS, LEAST_TOKENS, Plan, PlanError, Rule, load_plan, uniform_plan


@dataclass(frozen=True)
class Method:
    """A sparsity method. Without in_advance and shares_budget it reads everything."""

    name: str
    about: str  # a description, for people
    rule: Rule = "top_k"  # of its budget, unless the plan has one
    announcing: Announcing | None = None  # what its draft sends
    in_advance: InAdvance | None = None  # its choice, where that is known before a pass
    shares_budget: bool = False  # whether the pass itself shares out one budget over all layers and heads
    window: int | None = None  # blocks always read before the committed end; None: the plan's
    remembers: bool = False  # whether it wants the weights of the blocks that were read
    stands_in: bool = False  # whether group means stand in for the rest
    summaries: Callable[[Plan, int], float] = lambda plan, base: 0.0  # tokens of KV a sparse head reads beside blocks

    def rule_of(self, plan: Plan) -> Rule:
        """Return the plan's rule, or the method's own where the plan has none."""
        return plan.rule or self.rule

    @property
    def reads_by_memory(self) -> bool:
        """Whether the target's own memory alone decides which blocks are read."""
        return self.shares_budget and self.announcing is None

    def uses_means(self, plan: Plan) -> bool:
        """Whether group means stand in for what is not read under this plan."""
        return self.stands_in and plan.group_size > 0 and plan.budget < 1


_ALL = [
    Method("dense", "reads everything"),
    Method("streaming", "sinks and a window (StreamingLLM)", in_advance=in_advance.streaming),
    Method(
        "pillar", "what the last verification weighed most (SparseSpec)", in_advance=in_advance.pillar, remembers=True
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
        shares_budget=True,
        window=LEAST_WINDOW,
        remembers=True,
        stands_in=True,
        summaries=summary_tokens,
    ),
]
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
# The method that screens the tokens of exact sessions between dense passes, which weigh everything. It has no name for
# clients.
BY_MEMORY = Method(
    "memory",
    "what the target's own passes weighed most, under one budget for all heads, group means for the rest",
    shares_budget=True,
    remembers=True,
    stands_in=True,
    summaries=summary_tokens,
)


def method_named(name: str) -> Method:
    """Return the method of a name. Raises PlanError for an unknown name."""
    try:
        return METHODS[name]
    except KeyError:
        raise PlanError(f"sparsity method {name!r}; known are {', '.join(METHODS)}") from None


def _fits(method: Method, plan: Plan) -> bool:
    return method.rule_of(plan) == "top_k" or method.name not in ("ahead", "streaming")


def check_method(method: Method, plan: Plan) -> None:
    """Raise PlanError where the plan does not have what the method needs."""
    if not _fits(method, plan):
        raise PlanError(f"method {method.name!r} takes a top_k budget, the plan's rule is top_p")


def check_served(plan: Plan) -> None:
    """Raise PlanError for a plan that evaluation can use and services cannot."""
    check_method(method_named(plan.method), plan)
    if plan.sharing != "pooled":
        raise PlanError(
            f"sharing {plan.sharing!r} is for evaluation: all queries of a served round have a say in one selection "
            "('pooled')"
        )


def load_served_plan(file: str, budget: float, method: str, target: str = "", draft: str = "") -> Plan:
    """Return a plan that services can use, with another budget or method unless they are 0 and "".

    file: "" for a pair without a plan. It gets the one that follows from its models' configs (`uniform_plan`), which
        reads everything unless a budget is stated, since nobody knows yet how good a guide this draft is
    target, draft: the models, by folder or Hugging Face id; draft "": there is none
    Raises PlanError for a plan that cannot be read or served.
    """
    if file:
        plan = load_plan(file)
    else:
        shape, drafting = load_shape(target), load_shape(draft) if draft else None
        heads = (drafting.num_layers, drafting.num_heads) if drafting else (1, 1)
        least = ALL_TOKENS if draft and not budget else LEAST_TOKENS
        plan = uniform_plan(shape.num_layers, shape.num_kv_heads, *heads, least_tokens=least)
    plan = replace(plan, budget=budget or plan.budget, method=method or plan.method)
    check_served(plan)
    return plan


def methods_of(plan: Plan) -> list[str]:
    """Return the names of the methods that this plan allows."""
    return [name for name, method in METHODS.items() if _fits(method, plan)]
