"""What the pieces of a verifier share."""

from collections import Counter
from dataclasses import dataclass, field

from specahead.config import TargetSettings
from specahead.engine.steps.runner import TargetRunner
from specahead.sparsity.plan import Plan
from target_service.hooks import NO_HOOKS, Hooks


@dataclass(frozen=True)
class Target:
    """A target's model with its plan and settings."""

    runner: TargetRunner
    plan: Plan
    settings: TargetSettings
    counters: Counter[str] = field(default_factory=Counter)
    """What has happened since the start, by name."""
    hooks: Hooks = NO_HOOKS
    """Of tests and benchmarks."""
