"""Where tests and benchmarks hang something into a verifier. A deployed service has none of it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specahead.engine.steps.device_chain import Imposed
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.wire.messages import At, DraftEvent
from target_service.verify_step import VerifyRound

Judge = Callable[[VerifyRound, int], Imposed]
"""Returns the verdict on a round, given the vocabulary's size. It must return the same verdict each time."""

OnRound = Callable[[At, int, Tensor], None]
"""Takes where a sparse round began, how many drafted tokens it kept, and the blocks that it read as bool [layers,
kv_heads, blocks]."""


@dataclass(frozen=True)
class Hooks:
    """Each field replaces or watches one thing; the defaults change nothing."""

    judge: Judge | None = None
    """Decides every verdict in place of the model, for models of random weights. Sessions then have neither grammars
    nor log probabilities."""
    on_round: OnRound | None = None
    """Is called with each sparse round after its commit."""
    on_draft_event: Callable[[DraftEvent], None] | None = None
    """Is called with each message of a draft before it is applied."""
    new_reader: Callable[[Plan, bool], Reader] = Reader
    """Makes the reader of a sparse session, given the plan and whether it reports the blocks it read."""

    @property
    def imposes_verdicts(self) -> bool:
        """Whether verdicts come from a judge and not from the model."""
        return self.judge is not None

    @property
    def reports_blocks(self) -> bool:
        """Whether readers report which blocks they read."""
        return self.on_round is not None


NO_HOOKS = Hooks()
