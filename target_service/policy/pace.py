"""The policy's state of one session."""

from dataclasses import dataclass, field

from target_service.policy.acceptance import Acceptance
from target_service.policy.plans import PLAIN, RoundPlan

FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # tokens
TRIAL = 4  # rounds that proposing gets after a pause, before it is judged


@dataclass(slots=True)
class Pause:
    """A time without proposals, after some that were of no use: each one twice as long as the one before."""

    until: int = 0
    """The number of committed tokens at which it ends."""
    next: int = FIRST_PAUSE
    """Tokens that the next one lasts."""

    def begin(self, committed: int) -> None:
        """Begin a pause when `committed` tokens are committed."""
        self.until = committed + self.next
        self.next = min(2 * self.next, LONGEST_PAUSE)

    def lasts(self, committed: int) -> bool:
        """Return whether a session of `committed` tokens pauses."""
        return committed < self.until

    def paid(self) -> None:
        """Let the next pause be a short one, since proposals paid."""
        self.next = FIRST_PAUSE


@dataclass(slots=True)
class Pace:
    """How a session's next round is made, and figures of its last ones."""

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(()))
    """Of what its draft, or it itself, proposes; of no position before its first round is planned."""
    next_round: RoundPlan = PLAIN
    """How its next round is made."""
    pause: Pause = field(default_factory=Pause)
    """Its own pause, while other sessions go on."""
    trial: int = 0
    """Rounds with proposals after a pause that are still to come before they are judged."""
    prompt_tokens: int = 0
    """Tokens of its prompt that the target has read."""
    prompt_seconds: float = 0.0
    """Seconds of the target's steps that have read it: its share of each, by tokens."""
    last_gamma: int = -1
    """Tokens that were proposed in its last round; -1 before the first."""
    committed_at: float | None = None
    """When its last round was finished, by time.monotonic; None if it ran something else since."""
