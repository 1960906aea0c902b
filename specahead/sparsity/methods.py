"""How sessions read: by what a draft announces, or by the target's own memory."""

from dataclasses import dataclass, replace

from specahead.engine.loading.config import load_shape
from specahead.sparsity.plan import ALL_TOKENS, LEAST_TOKENS, Plan, load_plan, uniform_plan


@dataclass(frozen=True)
class Method:
    """How a session reads its KV."""

    name: str
    about: str
    """A description for people."""
    sparse: bool = False
    """Whether a pass shares out one budget over all layers and heads, by the weights that the target remembers; group
    means then stand in for the rest. A method that is not sparse reads everything."""
    announced: bool = False
    """Whether a draft announces blocks, which are read in any case."""

    @property
    def reads_by_memory(self) -> bool:
        """Whether the target's own memory alone decides which blocks are read."""
        return self.sparse and not self.announced

    def uses_means(self, plan: Plan) -> bool:
        """Whether group means stand in for what is not read under this plan."""
        return self.sparse and plan.group_size > 0 and plan.budget < 1


AHEAD = Method(
    "ahead",
    "draft and own weights under one budget for all heads, group means for the rest",
    sparse=True,
    announced=True,
)
# Screens the tokens of exact sessions between dense passes, which weigh everything. Clients cannot ask for it.
BY_MEMORY = Method(
    "memory",
    "what the target's own passes weighed most, under one budget for all heads, group means for the rest",
    sparse=True,
)


def load_served_plan(file: str, budget: float, target: str = "", draft: str = "") -> Plan:
    """Return a plan that services can use, with another budget unless that is 0.

    file: "" for a pair without a plan. It gets the one that follows from its models' configs (`uniform_plan`), which
        reads everything unless a budget is stated, since nobody knows yet how good a guide this draft is
    target, draft: the models, by folder or Hugging Face id; draft "": there is none
    Raises PlanError for a plan that cannot be read.
    """
    if file:
        plan = load_plan(file)
    else:
        shape, drafting = load_shape(target), load_shape(draft) if draft else None
        heads = (drafting.num_layers, drafting.num_heads) if drafting else (1, 1)
        least = ALL_TOKENS if draft and not budget else LEAST_TOKENS
        plan = uniform_plan(shape.num_layers, shape.num_kv_heads, *heads, least_tokens=least)
    return replace(plan, budget=budget or plan.budget)
