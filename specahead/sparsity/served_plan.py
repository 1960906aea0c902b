"""The plan that services use: of a file, or the one that follows from the sizes of the models."""

from dataclasses import replace

from specahead.engine.loading.config import load_config, load_shape
from specahead.engine.model.head_config import is_head
from specahead.sparsity.plan import ALL_TOKENS, LEAST_TOKENS, Plan, load_plan, uniform_plan


def load_served_plan(file: str, budget: float, target: str = "", draft: str = "") -> Plan:
    """Return a plan that services can use, with another budget unless that is 0.

    file: "" for a pair without a plan. It gets the one that follows from its models' configs (`uniform_plan`), which
        reads everything unless a budget is stated, since nobody knows yet how good a guide this draft is
    target, draft: the models, by folder or Hugging Face id; draft "": there is none. A head announces nothing: its
        plan has the one draft head that a target without a draft has
    Raises PlanError for a plan that cannot be read.
    """
    if file:
        plan = load_plan(file)
    else:
        announces = draft != "" and not is_head(load_config(draft))
        shape, drafting = load_shape(target), load_shape(draft) if announces else None
        heads = (drafting.num_layers, drafting.num_heads) if drafting else (1, 1)
        least = ALL_TOKENS if draft and not budget else LEAST_TOKENS
        plan = uniform_plan(shape.num_layers, shape.num_kv_heads, *heads, least_tokens=least)
        if shape.chooses_blocks:  # nothing is chosen for layers that choose what they read by themselves
            plan = replace(plan, dense_layers=tuple(range(shape.num_layers)), group_size=0)
    return replace(plan, budget=budget or plan.budget)
