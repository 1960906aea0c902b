"""What each side of a pair opens before it serves: its model, the plan, and the Hello that speaks for both."""

from dataclasses import dataclass, replace

from engine.loading import ModelSettings, ModelShape, open_model
from engine.runner import Runner
from sparsity.methods import check_served
from sparsity.plan import Plan, load_plan, overridden
from wire.messages import Hello


@dataclass(frozen=True)
class SideSettings:
    """name: for messages and metrics. plan: its file. budget, method: instead of the plan's, if given."""

    name: str
    model: ModelSettings
    plan: str
    gamma: int
    budget: float | None = None
    method: str | None = None


@dataclass(frozen=True)
class Side:
    runner: Runner
    shape: ModelShape
    plan: Plan
    hello: Hello


def open_side(settings: SideSettings) -> Side:
    """Load model and plan. Raises PlanError, OSError or what transformers raises for a model it cannot load."""
    plan = overridden(load_plan(settings.plan), settings.budget, settings.method)
    check_served(plan)
    dense = tuple(sorted(set(plan.dense_layers)))
    of_plan = replace(settings.model, dense_layers=dense, group_size=plan.group_size)
    opened = open_model(replace(of_plan, step_queries=settings.gamma + 1))
    hello = Hello(
        peer=settings.name,
        model=settings.model.model,
        vocab_size=opened.shape.vocab_size,
        tokenizer_hash=opened.tokenizer_hash,
        plan_hash=plan.hash,
        gamma=settings.gamma,
        block_size=plan.block_size,
    )
    return Side(opened.runner, opened.shape, plan, hello)
