"""What each side of a pair opens before it serves: its model, the plan, and the Hello that speaks for both."""

from dataclasses import dataclass

from engine.loading import ModelSettings, ModelShape, open_model
from engine.runner import Runner
from sparsity.plan import Plan, load_plan, with_budget
from wire.messages import Hello


@dataclass(frozen=True)
class SideSettings:
    """name: for messages and metrics. plan: its file. budget: instead of the plan's, if given."""

    name: str
    model: ModelSettings
    plan: str
    gamma: int
    budget: float | None = None


@dataclass(frozen=True)
class Side:
    runner: Runner
    shape: ModelShape
    plan: Plan
    hello: Hello


def open_side(settings: SideSettings) -> Side:
    """Load model and plan. Raises PlanError, OSError or what transformers raises for a model it cannot load."""
    plan = with_budget(load_plan(settings.plan), settings.budget)
    opened = open_model(settings.model)
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
