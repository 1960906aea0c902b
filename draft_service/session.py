"""One session as the draft sees it: the committed tokens, its own guesses behind them, and where they stand.

All of it is disposable: a Begin rebuilds it. Rounds are proposed one ahead of the verdicts: while round r is
being judged, round r + 1 is drafted on the guess that all of r is accepted and that the target then adds the
token that the draft itself would have.
"""

from dataclasses import dataclass, field

from torch import Tensor

from engine.kv.pages import SequenceKV
from engine.sampling import Sampling, Support
from sparsity.methods import Method, method_named
from sparsity.selection import BlockSelection
from wire.messages import At, Begin, Proposal, Verdict
from wire.selection_codec import Reference

_RETRY = 16  # rounds
_NEWEST = 1 / 8  # weight of the newest verdict in `foresight`

Named = tuple[
    Reference, BlockSelection
]  # a selection that the target is known to hold, and its name on the wire


@dataclass
class DraftSession:
    """`tokens`: committed ones, then drafted ones; KV exists for the first kv.length of them."""

    id: str
    tokens: list[int]
    committed: int
    epoch: int
    judged: int  # rounds with a verdict: the next verdict is for round `judged`
    sampling: Sampling
    max_length: int
    method: Method | None  # what it announces by; None: nothing
    gamma: int
    ready_due: bool = True  # the target does not wait for this draft until it says Ready
    kv: SequenceKV = field(default_factory=SequenceKV)
    # The round being drafted.
    round: int = 0
    base: int = 0
    supports: list[Support] = field(default_factory=list)
    evidence: list[Tensor] = field(default_factory=list)  # block weights of its queries so far
    selection: BlockSelection | None = None  # announced from all queries
    proposal: Proposal | None = None  # sent for this round
    guess: int | None = None  # at the token that the target will add to it, once its last token has been run
    draft_seconds: float = 0.0
    waiting: int = 0  # since which of the drafter's steps it could have been drafted
    foresight: float = (
        1.0  # how often, of late, a verdict was the one guessed: all accepted, and `guess` behind it
    )
    # The round under judgement, while this one is drafted ahead of its verdict.
    judging: BlockSelection | None = None
    reference: Named | None = None  # what was announced for the round judged last
    early_verdicts: dict[int, Verdict] = field(default_factory=dict)

    @staticmethod
    def from_begin(begin: Begin, gamma: int) -> "DraftSession":
        session = DraftSession(
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
        session.start_round(begin.at.round, len(begin.tokens))
        return session

    @property
    def at(self) -> At:
        return At(self.id, self.epoch, self.round, self.base)

    @property
    def known_selections(self) -> list[Named]:
        """What the target holds or will have received before the next announcement, the newest first."""
        known = [] if self.reference is None else [self.reference]
        if self.judging is None or self.round == self.judged:
            return known
        return [((self.epoch, self.judged), self.judging), *known]

    @property
    def last_announced(self) -> Named | None:
        known = self.known_selections
        return known[0] if known else None

    @property
    def pending(self) -> list[int]:
        """Tokens still to run before the next one can be drafted."""
        return self.tokens[self.kv.length :]

    @property
    def gamma_here(self) -> int:
        """Tokens to propose in this round: the target adds one, and neither goes beyond max_length."""
        return max(1, min(self.gamma, self.max_length - self.base - 1))

    @property
    def selection_due(self) -> bool:
        """Whether the round's selection waits for its last query: the last token proposed, run once more."""
        return self.method is not None and self.proposal is not None and self.selection is None

    def wants_step(self, ahead: bool) -> bool:
        """Whether there is anything to draft, or to announce, before the next verdict."""
        if self.proposal is None or self.selection_due:
            return True
        return (
            ahead and self.guess is None and self.round == self.judged and len(self.tokens) < self.max_length
        )

    def foresees(self, least: float) -> bool:
        """Whether guesses come true often enough; every _RETRY-th round is tried whatever they did."""
        return self.foresight >= least or self.round % _RETRY == 0

    def go_ahead(self) -> None:
        """Start the next round on the guess, if there is one and no other round is drafted ahead already."""
        if self.guess is not None and self.round == self.judged and len(self.tokens) < self.max_length:
            self.tokens.append(self.guess)
            self.judging = self.selection
            self.start_round(self.round + 1, len(self.tokens))

    def start_round(self, round_: int, base: int) -> None:
        self.round, self.base, self.waiting = round_, base, 0
        self.supports, self.proposal, self.guess, self.draft_seconds = [], None, None, 0.0
        self.evidence, self.selection = [], None

    def apply(self, verdict: Verdict) -> bool:
        """Take the verdict on round `judged`; True if what was drafted beyond it still holds.

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
        ahead_holds = (
            self.round > self.judged and self.base == new_length and self.tokens[base:new_length] == tokens
        )
        self.judging = None
        self.committed = new_length
        self.epoch, self.judged = verdict.at.epoch, verdict.at.round
        if not ahead_holds:
            self.tokens[base:] = tokens
            self.start_round(self.judged, new_length)
        if verdict.plain:
            self.ready_due = True
        return ahead_holds

    def _take_foresight(self, verdict: Verdict) -> None:
        """Whether the verdict is the guess, whether or not a round was drafted on it."""
        guess = self.tokens[self.base - 1] if self.round > self.judged else self.guess
        if guess is None or verdict.plain:
            return
        last = self.base - 1 if self.round > self.judged else len(self.tokens)
        true = [*self.tokens[verdict.at.base : last], guess] == verdict.tokens
        self.foresight += _NEWEST * (true - self.foresight)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading elements two lists share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
