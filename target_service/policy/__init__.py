"""How a target's rounds are made: one estimate of acceptance, one table of costs, one choice of the fastest plan.

Knows no sessions, no messages and no device: `target_service.pacing` tells it what rounds gave and took.
"""

from target_service.policy.acceptance import Acceptance
from target_service.policy.choice import Choice, Policy
from target_service.policy.costs import CostTable, Ended, Measured
from target_service.policy.pace import Pace, Pause
from target_service.policy.plans import PLAIN, Load, Options, Proposer, RoundKind, RoundPlan, Verified
from target_service.policy.sizes import Sizes

__all__ = [
    "PLAIN",
    "Acceptance",
    "Choice",
    "CostTable",
    "Ended",
    "Load",
    "Measured",
    "Options",
    "Pace",
    "Pause",
    "Policy",
    "Proposer",
    "RoundKind",
    "RoundPlan",
    "Sizes",
    "Verified",
]
