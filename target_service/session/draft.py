"""A session's draft: who it is, and what it has sent."""

from collections.abc import Callable
from dataclasses import dataclass, field

from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import Proposals, TargetEvent, Verdict

RoundKey = tuple[int, int]  # (epoch, round)


@dataclass(eq=False)
class DraftPeer:
    """A draft at the other end of a stream."""

    name: str
    send: Callable[[TargetEvent], None]
    """Sends an event to it."""
    sessions: set[str] = field(default_factory=set)
    """The names of the sessions that it drafts for."""
    takes_turns: bool = False
    """Whether its steps and the target's take turns on one device, so that nothing else would run meanwhile."""
    other_sessions: int = 0
    """How many sessions it drafts for other targets, as it has said."""

    @property
    def load(self) -> int:
        """How many sessions it drafts for in all."""
        return len(self.sessions) + self.other_sessions


@dataclass
class DraftState:
    """What the target knows of a session's draft."""

    peer: DraftPeer | None = None
    """The session's draft; None if it has none."""
    awaited: bool = False
    """Whether to wait for its proposals before decoding plainly."""
    proposals: dict[RoundKey, Proposals] = field(default_factory=dict)
    """What it proposes for a round. Proposals for the next round assume several outcomes of this one."""
    announced: dict[RoundKey, BlockSelection] = field(default_factory=dict)
    """What it announces for a round: the blocks to read."""
    announced_before: dict[RoundKey, BlockSelection] = field(default_factory=dict)
    """What it had announced for the round judged last, which later announcements may refer to."""
    foreseen: bool = False
    """Whether the current round was proposed before the last verdict."""
    last_judged: tuple[RoundKey, Verdict] | None = None
    """The round judged last and its verdict, for a draft that asks again."""

    @property
    def known_selections(self) -> dict[RoundKey, BlockSelection]:
        """Selections that an announcement may refer to: of the round judged last and of rounds not judged yet."""
        return self.announced_before | self.announced

    def forget(self) -> None:
        """Forget what it has sent, and what its announcements may refer to, since it begins anew."""
        self.proposals.clear()
        self.announced.clear()
        self.announced_before.clear()

    def advance(self, epoch: int, round_: int) -> None:
        """Keep what it has sent for the round `round_` of an epoch and for later ones only."""
        if self.announced or self.proposals:
            self.announced = {k: v for k, v in self.announced.items() if k[0] == epoch and k[1] >= round_}
            self.proposals = {k: v for k, v in self.proposals.items() if k[0] == epoch and k[1] >= round_}
