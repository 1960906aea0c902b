"""The sessions of a draft, by target: the committed tokens of each, its own guesses behind them, and where they stand.

All of it is disposable: a Begin rebuilds it. Rounds are proposed one ahead of the verdicts: while round r is judged,
round r + 1 is drafted for the likeliest outcomes, a branch each (Saguaro, arXiv 2603.03251). A verdict that is among
them finds its round drafted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from draft_service.verdict_times import VerdictTimes
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.grammars import GrammarState
from specahead.engine.steps.rounds.requests import Branch, CodedBitmap, DraftedTokens, MovedKV
from specahead.engine.steps.rounds.rules import RoundRules, SessionRules, session_rules
from specahead.sparsity.methods import Method, method_named
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import At, Begin, DraftEvent, Verdict
from specahead.wire.selection_codec import NamedSelection, Reference

_RETRY = 16  # rounds
_NEWEST = 1 / 8  # weight of the newest verdict in `foresight`, `accepted` and `judged`


@dataclass(eq=False)
class TargetPeer:
    """A target at the other end of a stream: how to send to it, and its sessions that are drafted for.

    ended: the last sessions that are over; late verdicts on them are of no interest. told: how many sessions of other
    targets it knows of. verdicts: when they came.
    """

    send: Callable[[DraftEvent], None]
    sessions: dict[str, "DraftSession"] = field(default_factory=dict)
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=1024))
    told: int = 0
    verdicts: VerdictTimes = field(default_factory=VerdictTimes)


@dataclass(frozen=True)
class BranchAhead:
    """An outcome of the verdict to come, and what was drafted for the round behind it.

    The outcome ends with `token` at position base - 1; the round begins at `base`. source: the position at which the KV
    of `token` lies, and behind it that of the drafted tokens. alternative: the token before `token`, if it is another
    than was drafted there.
    """

    base: int
    token: int
    drafted: DraftedTokens
    source: int
    alternative: int | None = None


@dataclass(frozen=True)
class CodedSelection:
    """What a selection is different in from the one that `reference` names; None: from an empty one."""

    difference: CodedBitmap
    reference: Reference | None


@dataclass(frozen=True)
class RoundAhead:
    """The next round, drafted ahead. selection: what is announced for all its branches, of blocks before `base`.

    coded: the same as bytes, if the runner made them.
    """

    base: int
    selection: BlockSelection | None
    coded: CodedSelection | None
    branches: list[BranchAhead]
    seconds: float


@dataclass(eq=False)
class DraftSession:
    """One session. `tokens` are the committed ones, then drafted ones; KV exists for the first kv.length of them.

    round: the round that is drafted or under judgement. method: what it announces by, None if it announces nothing.
    gamma: tokens that the target wants drafted a round, at most `most_gamma`. dense: whether it wants no announcements.
    target_draws_own: whether it keeps the tokens that it draws itself, and this draft is to draw by the same numbers.
    ready_due: whether the target is still to be told that it may wait for this draft. rules: what changes its logits.
    grammar: what its text follows. traceparent: of its request, if that is traced.

    Of the round: drafted is what was drafted, None until it is, in `seconds`; selection is what was announced, of the
    blocks before `selection_base`, and `coded` its bytes; ahead is the round behind it, if that is drafted. moved: KV
    of the round's tokens that is not in its place yet, behind which all pages stay as they are.

    foresight: how often, of late, a verdict met one of the outcomes drafted for. accepted, judged: how many tokens of a
    round were accepted of late, and how many were judged. reference: what was announced for the round judged last.
    early_verdicts: those that came before the ones they follow, by the round that they judge.
    """

    peer: TargetPeer
    id: str
    tokens: list[int]
    committed: int
    epoch: int
    round: int
    sampling: Sampling
    max_length: int
    method: Method | None
    gamma: int
    most_gamma: int
    dense: bool = False
    target_draws_own: bool = False
    rules: SessionRules | None = None
    grammar: GrammarState | None = None
    traceparent: str = ""
    ready_due: bool = True
    kv: SequenceKV = field(default_factory=SequenceKV)
    drafted: DraftedTokens | None = None
    seconds: float = 0.0
    selection: BlockSelection | None = None
    selection_base: int = 0
    coded: CodedSelection | None = None
    ahead: RoundAhead | None = None
    moved: MovedKV | None = None
    foresight: float = 1.0
    accepted: float = 2.8
    judged: float = 4.0
    reference: NamedSelection | None = None
    early_verdicts: dict[int, Verdict] = field(default_factory=dict)

    @staticmethod
    def from_begin(peer: TargetPeer, begin: Begin, gamma: int, grammar: GrammarState | None = None) -> "DraftSession":
        """Return a session that stands where `begin` says, and drafts up to `gamma` tokens a round.

        Raises PlanError for an unknown method.
        """
        # What may come last is the grammar's affair, which the target's min_tokens gives way to.
        sampling = begin.sampling if grammar is None else replace(begin.sampling, min_tokens=0)
        return DraftSession(
            peer=peer,
            id=begin.at.session,
            tokens=list(begin.tokens),
            committed=len(begin.tokens),
            epoch=begin.at.epoch,
            round=begin.at.round,
            sampling=sampling,
            max_length=begin.max_length,
            method=method_named(begin.method) if begin.method else None,
            gamma=min(begin.gamma or gamma, gamma),
            most_gamma=gamma,
            dense=begin.dense,
            target_draws_own=begin.draws_own,
            rules=session_rules(sampling, begin.prompt_tokens, begin.stop_token_ids),
            grammar=grammar,
            traceparent=begin.traceparent,
        )

    @property
    def at(self) -> At:
        """The round that is drafted or under judgement."""
        return At(self.id, self.epoch, self.round, self.committed)

    @property
    def newest_known(self) -> NamedSelection | None:
        """The newest selection that the target holds or will have received before the next announcement."""
        return self.reference if self.selection is None else ((self.epoch, self.round), self.selection)

    @property
    def pending(self) -> list[int]:
        """Tokens still to run before the next one can be drafted."""
        return self.tokens[self.kv.length :]

    @property
    def acceptance(self) -> float:
        """The share of tokens that were accepted of late, of those that were judged: each counts alike."""
        return self.accepted / self.judged

    @property
    def waits_for_grammar(self) -> bool:
        """Whether its grammar is not compiled yet."""
        return self.grammar is not None and not self.grammar.ready

    @property
    def may_go_ahead(self) -> bool:
        """Whether a round is under judgement, the next one is not drafted, and there is room for it."""
        return self.drafted is not None and self.ahead is None and len(self.tokens) + 1 < self.max_length

    def tokens_to_propose(self, base: int) -> int:
        """Return γ, or fewer near the end: the target adds one token, and neither side goes beyond max_length."""
        return max(1, min(self.gamma, self.max_length - base - 1))

    def rules_behind(self, branches: Sequence[Branch]) -> RoundRules | None:
        """Return the rules of a round: of its branches, or of the tokens that are pending."""
        if self.rules is None:
            return None
        committed = self.tokens[: self.committed]
        guessed = [[*self.tokens[self.committed : branch.length], branch.token] for branch in branches]
        return RoundRules(self.rules, committed, guessed)

    def foresees(self, least: float) -> bool:
        """Return whether outcomes are met often enough; every _RETRY-th round is tried whatever they did."""
        return self.foresight >= least or (self.round + 1) % _RETRY == 0

    def apply(self, verdict: Verdict, kv: KVCache) -> bool:
        """Take the verdict on the round. Returns whether it met an outcome that the next round is drafted for.

        One from fewer tokens on than are committed takes the others back. Raises ValueError if it begins behind them,
        or if KV to be taken back is shared with another session.
        """
        base, tokens = verdict.at.base, verdict.tokens
        if not 0 < base <= self.committed:
            raise ValueError(f"verdict from {base} on, {self.committed} tokens are committed here")
        kv.take_back(self.kv, base)
        self.gamma, self.dense = min(verdict.gamma or self.gamma, self.most_gamma), verdict.dense
        met, proposed = self._branch_met(base, tokens), self.tokens[base:]
        self._take_statistics(verdict, met is not None)
        if self.selection is not None and not verdict.plain:
            self.reference = (self.epoch, self.round), self.selection
        self.committed = base + len(tokens)
        self.epoch, self.round = verdict.at.epoch, verdict.at.round
        if met is None:
            self.tokens[base:] = tokens
            self.drafted = self.selection = None
            agree = (a == b for a, b in zip(proposed, tokens, strict=False))
            common = base + sum(takewhile(bool, agree))
            # The last token is always run again: its logits start the next round.
            self.cut_kv(kv, min(self.kv.length, common, len(self.tokens) - 1))
        else:
            self._go_on(*met)
        self.ahead = None
        if verdict.plain:
            self.ready_due = True
        return met is not None

    def _branch_met(self, base: int, tokens: list[int]) -> tuple[RoundAhead, BranchAhead] | None:
        """Return the branch whose outcome a verdict's tokens are, and the round that it belongs to."""
        end = self.committed + len(tokens)
        if self.ahead is None or base < self.committed:
            return None
        for branch in self.ahead.branches:
            if branch.base != end or branch.token != tokens[-1]:
                continue
            assumed = self.tokens[self.committed : end - 1]
            if branch.alternative is not None:
                assumed[-1:] = [branch.alternative]
            if assumed == tokens[:-1]:
                return self.ahead, branch
        return None

    def _go_on(self, ahead: RoundAhead, branch: BranchAhead) -> None:
        """Stand in the round that a branch has drafted; the committed tokens end with the branch's first token."""
        drafted = branch.drafted
        if branch.alternative is not None:
            self.tokens[branch.base - 2] = branch.alternative
        self.tokens[branch.base - 1 :] = [branch.token, *drafted.tokens[: drafted.proposed]]
        self.drafted, self.seconds = branch.drafted, ahead.seconds
        self.selection, self.selection_base, self.coded = ahead.selection, ahead.base, ahead.coded
        self.kv.length = branch.base + drafted.run
        if branch.source != branch.base - 1:
            self.moved = MovedKV(branch.source, branch.base - 1, drafted.run + 1)

    def cut_kv(self, kv: KVCache, length: int) -> None:
        """Take KV back to `length` tokens. Pages are kept while KV that is to be moved lies there."""
        if self.moved is not None and length > self.moved.target:
            self.moved = replace(self.moved, count=length - self.moved.target)
            self.kv.length = length
        else:
            self.moved = None
            kv.truncate(self.kv, length)

    @property
    def tokens_in_place(self) -> int:
        """Committed tokens whose KV, if they have it, is in its place."""
        return self.committed if self.moved is None else min(self.committed, self.moved.target)

    def _take_statistics(self, verdict: Verdict, met: bool) -> None:
        """Count whether the verdict met an outcome that was drafted for, and the share of tokens accepted."""
        if verdict.plain or self.drafted is None:
            return
        proposed = self.drafted.proposed
        judged = min(proposed, verdict.accepted + 1)
        self.accepted += _NEWEST * (verdict.accepted - self.accepted)
        self.judged += _NEWEST * (judged - self.judged)
        if self.ahead is None:  # had there been a branch, it would have been the likeliest outcome
            met = verdict.tokens == self.drafted.tokens
        self.foresight += _NEWEST * (met - self.foresight)
