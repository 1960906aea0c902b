"""Where benchmarks hang something into a verifier. A deployed service has none of it."""

from collections.abc import Callable
from dataclasses import dataclass

from specahead.engine.steps.device_chain import Imposed
from specahead.wire.messages import DraftEvent
from target_service.verify_step import VerifyRound

Judge = Callable[[VerifyRound, int], Imposed]
"""Returns the verdict on a round, given the vocabulary's size. It must return the same verdict each time."""


@dataclass(frozen=True)
class Hooks:
    """Each field replaces or watches one thing; the defaults change nothing."""

    judge: Judge | None = None
    """Decides every verdict in place of the model, for models of random weights. Sessions then have neither grammars
    nor log probabilities."""
    on_draft_event: Callable[[DraftEvent], None] | None = None
    """Is called with each message of a draft before it is applied."""

    @property
    def imposes_verdicts(self) -> bool:
        """Whether verdicts come from a judge and not from the model."""
        return self.judge is not None


NO_HOOKS = Hooks()
