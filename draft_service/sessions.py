"""The sessions of a draft, by target: the committed tokens of each, its own guesses behind them, and where they stand.

All of it is disposable: a Begin rebuilds it. Rounds are proposed one ahead of the verdicts: while round r is judged,
round r + 1 is drafted on the guess that all of r is accepted and that the target then adds the token that the draft
itself would have added.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv.pages import SequenceKV
from engine.sampling import Sampling
from sparsity.methods import Method, method_named
from sparsity.selection import BlockSelection
from wire.messages import At, Begin, DraftEvent, Proposal, Verdict
from wire.selection_codec import NamedSelection

_RETRY = 16  # rounds
_NEWEST = 1 / 8  # weight of the newest verdict in `foresight`


@dataclass(eq=False)
class TargetPeer:
    """A target at the other end of a stream: how to send to it, and its sessions that are drafted for.

    ended: the last sessions that are over; late verdicts on them are of no interest.
    """

    send: Callable[[DraftEvent], None]
    sessions: dict[str, "DraftSession"] = field(default_factory=dict)
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=1024))


@dataclass(eq=False)
class DraftSession:
    """One session. `tokens` are the committed ones, then drafted ones; KV exists for the first kv.length of them.

    judged: rounds with a verdict, so that the next verdict is for the round of this number. method: what it announces
    by, None if it announces nothing. ready_due: whether the target is still to be told that it may wait for this draft.

    Of the round that is drafted or proposed: round and base are its number and its first position; selection and
    proposal are what was announced and proposed; guess is the token that the target is expected to add. waiting: since
    which of the drafter's steps the round could have been drafted, 0 if not yet.

    foresight: how often, of late, a verdict was the one guessed: all accepted, and `guess` behind it. judging: what was
    announced for the round under judgement, while the next one is drafted ahead. reference: what was announced for the
    round judged last. early_verdicts: those that came before the ones they follow, by the round that they judge.
    """

    peer: TargetPeer
    id: str
    tokens: list[int]
    committed: int
    epoch: int
    judged: int
    sampling: Sampling
    max_length: int
    method: Method | None
    gamma: int
    ready_due: bool = True
    kv: SequenceKV = field(default_factory=SequenceKV)
    round: int = 0
    base: int = 0
    selection: BlockSelection | None = None
    proposal: Proposal | None = None
    guess: int | None = None
    waiting: int = 0
    foresight: float = 1.0
    judging: BlockSelection | None = None
    reference: NamedSelection | None = None
    early_verdicts: dict[int, Verdict] = field(default_factory=dict)

    @staticmethod
    def from_begin(peer: TargetPeer, begin: Begin, gamma: int) -> "DraftSession":
        """Return a session that stands where `begin` says. Raises PlanError for an unknown method."""
        session = DraftSession(
            peer=peer,
            id=begin.at.session,
            tokens=list(begin.tokens),
            committed=len(begin.tokens),
            epoch=begin.at.epoch,
            judged=begin.at.round,
            sampling=begin.sampling,
            max_length=begin.max_length,
            method=method_named(begin.method) if begin.method else None,
            gamma=gamma,
        )
        session._start_round(begin.at.round, len(begin.tokens))
        return session

    @property
    def at(self) -> At:
        """The round that is drafted or proposed."""
        return At(self.id, self.epoch, self.round, self.base)

    @property
    def newest_known(self) -> NamedSelection | None:
        """The newest selection that the target holds or will have received before the next announcement."""
        return self.reference if self.judging is None else ((self.epoch, self.judged), self.judging)

    @property
    def last_announced(self) -> BlockSelection | None:
        """What was announced for the round before, if it is known."""
        return self.newest_known[1] if self.newest_known is not None else None

    @property
    def pending(self) -> list[int]:
        """Tokens still to run before the next one can be drafted."""
        return self.tokens[self.kv.length :]

    @property
    def tokens_to_propose(self) -> int:
        """γ, or fewer near the end: the target adds one token, and neither side goes beyond max_length."""
        return max(1, min(self.gamma, self.max_length - self.base - 1))

    def foresees(self, least: float) -> bool:
        """Return whether guesses come true often enough; every _RETRY-th round is tried whatever they did."""
        return self.foresight >= least or self.round % _RETRY == 0

    def go_ahead(self) -> None:
        """Start the next round on the guess, if there is one and no other round is drafted ahead already."""
        if self.guess is not None and self.round == self.judged and len(self.tokens) < self.max_length:
            self.tokens.append(self.guess)
            self.judging = self.selection
            self._start_round(self.round + 1, len(self.tokens))

    def _start_round(self, round_: int, base: int) -> None:
        self.round, self.base, self.waiting = round_, base, 0
        self.selection, self.proposal, self.guess = None, None, None

    def apply(self, verdict: Verdict) -> bool:
        """Take the verdict on round `judged`. Returns whether what was drafted beyond that round still holds.

        Raises ValueError if the verdict does not continue the tokens known here.
        """
        base, tokens = verdict.at.base, verdict.tokens
        if base != self.committed:
            raise ValueError(f"verdict from {base} on, {self.committed} tokens are committed here")
        self._take_foresight(verdict)
        judged_selection = self.judging if self.round > self.judged else self.selection
        if judged_selection is not None and not verdict.plain:
            self.reference = (self.epoch, self.judged), judged_selection
        new_length = base + len(tokens)
        ahead_holds = self.round > self.judged and self.base == new_length and self.tokens[base:new_length] == tokens
        self.judging = None
        self.committed = new_length
        self.epoch, self.judged = verdict.at.epoch, verdict.at.round
        if not ahead_holds:
            self.tokens[base:] = tokens
            self._start_round(self.judged, new_length)
        if verdict.plain:
            self.ready_due = True
        return ahead_holds

    def _take_foresight(self, verdict: Verdict) -> None:
        """Count whether the verdict is the guess, whether or not a round was drafted on it."""
        is_ahead = self.round > self.judged
        guess = self.tokens[self.base - 1] if is_ahead else self.guess
        if guess is None or verdict.plain:
            return
        last = self.base - 1 if is_ahead else len(self.tokens)
        true = [*self.tokens[verdict.at.base : last], guess] == verdict.tokens
        self.foresight += _NEWEST * (true - self.foresight)
