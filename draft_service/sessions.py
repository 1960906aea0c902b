"""The sessions that a draft drafts for: their committed tokens, their drafted rounds, and their KV.

All of it is disposable, since a Begin rebuilds it. While the target judges round r, the draft may already draft round
r + 1 for the likeliest outcomes of the verdict (overlap, after Saguaro, arXiv 2603.03251). If the verdict is one of
these outcomes, the next round is ready. Knows nothing of gRPC and runs no model.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.grammars import GrammarState
from specahead.engine.steps.requests import Branch, CodedBitmap, DraftedTokens, MovedKV
from specahead.engine.steps.rules import RoundRules, SessionRules, session_rules
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import At, Begin, DraftEvent, Verdict
from specahead.wire.selection_codec import NamedSelection, Reference

_RETRY = 16  # rounds between two trials of overlap where outcomes are seldom met
# A session reads its prompt while it lacks the KV of more tokens than a few rounds commit. Once it has had a round, it
# may lack more: those of rounds that went without a draft, and those of the page that was given back then.
_FEW_ROUNDS = 2
_CATCHING_UP = 64  # tokens
_NEWEST = 1 / 8  # weight of the newest verdict in running means


@dataclass(eq=False)
class TargetPeer:
    """A target at the other end of a stream."""

    send: Callable[[DraftEvent], None]
    sessions: dict[str, "DraftSession"] = field(default_factory=dict)
    """Sessions of this target that are drafted for, by name."""
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=1024))
    """Names of the sessions that ended last; late verdicts on them are ignored."""
    reported_others: int = 0
    """How many sessions other targets have, by the last Load sent to this one."""


@dataclass(frozen=True)
class DraftedOutcome:
    """An outcome of a verdict, and the tokens drafted for the round after it."""

    base: int
    """Committed tokens after this outcome; the drafted tokens begin here."""
    token: int
    """The outcome's last token, at position base - 1."""
    drafted: DraftedTokens
    source: int
    """Position at which the KV of `token` lies; that of the drafted tokens follows it."""
    alternative: int | None = None
    """The token before `token`, where it differs from the one that was drafted there."""


@dataclass(frozen=True)
class DraftedRound:
    """A round as it was drafted: for the committed tokens (one outcome), or for several outcomes of a verdict."""

    base: int
    """Committed tokens of the shortest outcome. Blocks of tokens before it are announced."""
    outcomes: Sequence[DraftedOutcome]
    seconds: float
    """Duration of the step that drafted it."""
    selection: BlockSelection | None = None
    """The announced blocks, for all outcomes alike; None: nothing is announced."""
    coded: CodedBitmap | None = None
    """The selection's difference from another one as bytes, where the runner encoded it."""
    coded_from: Reference | None = None
    """Names that other selection; None: an empty one."""

    @property
    def drafted(self) -> DraftedTokens:
        """The tokens of a round with one outcome."""
        (outcome,) = self.outcomes
        return outcome.drafted


@dataclass(frozen=True)
class Terms:
    """What a Begin fixes for a session."""

    sampling: Sampling
    max_length: int
    """Tokens of prompt and answer, at most."""
    most_gamma: int
    """Tokens that a round proposes, at most."""
    announces: bool
    """Whether rounds announce blocks."""
    draws_own: bool
    """Whether the target keeps tokens that it drew itself, so that the draft draws with the same numbers."""
    rules: SessionRules | None
    """Change the draft's logits; None: nothing does."""
    grammar: GrammarState | None


@dataclass
class VerdictStatistics:
    """Running means over a session's verdicts."""

    foresight: float = 1.0
    """Share of verdicts that met an outcome drafted for."""
    accepted: float = 2.8
    """Tokens accepted in a round."""
    judged: float = 4.0
    """Tokens judged in a round, up to the first rejected one."""

    @property
    def acceptance(self) -> float:
        """Share of judged tokens that were accepted."""
        return self.accepted / self.judged

    def note(self, proposed: int, accepted: int, met: bool) -> None:
        """Take up a verdict on `proposed` tokens."""
        self.accepted += _NEWEST * (accepted - self.accepted)
        self.judged += _NEWEST * (min(proposed, accepted + 1) - self.judged)
        self.foresight += _NEWEST * (met - self.foresight)


@dataclass(eq=False)
class DraftSession:
    """One session, with the round that is drafted or under judgement (`present`) and the next one (`overlap`)."""

    peer: TargetPeer
    at: At
    """Name, epoch and round, and the number of committed tokens (base)."""
    terms: Terms
    tokens: list[int]
    """Committed tokens, then drafted ones."""
    gamma: int
    """Tokens that the target wants proposed a round."""
    skipped: int = 0
    """Tokens at the beginning of the prompt that the draft does not read. All but `at` counts from there on."""
    dense: bool = False
    """Whether the target wants no announcements at present."""
    kv: SequenceKV = field(default_factory=SequenceKV)
    """KV of the first kv.length tokens."""
    present: DraftedRound | None = None
    """The round under judgement; None until it is drafted."""
    overlap: DraftedRound | None = None
    """The next round, drafted before the verdict on the present one."""
    moved: MovedKV | None = None
    """KV of the present round that is not in its place yet. Until it is, no later page is freed."""
    ready_due: bool = True
    """Whether the target has still to hear that it may wait for this draft."""
    reference: NamedSelection | None = None
    """The selection that was announced for the round judged last."""
    statistics: VerdictStatistics = field(default_factory=VerdictStatistics)
    begun: bool = False
    """Whether the draft has read a part of its prompt."""

    @staticmethod
    def from_begin(
        peer: TargetPeer, begin: Begin, gamma: int, grammar: GrammarState | None, skipped: int
    ) -> "DraftSession":
        """Return a session that stands where `begin` says, and proposes up to `gamma` tokens a round.

        grammar: of the text without the `skipped` tokens.
        """
        # A grammar decides when a text may end, which the target's min_tokens gives way to.
        sampling = begin.sampling if grammar is None else replace(begin.sampling, min_tokens=0)
        terms = Terms(
            sampling=sampling,
            max_length=begin.max_length - skipped,
            most_gamma=gamma,
            announces=begin.announces,
            draws_own=begin.draws_own,
            rules=session_rules(sampling, begin.prompt_tokens - skipped, begin.stop_token_ids),
            grammar=grammar,
        )
        at = begin.at._replace(base=len(begin.tokens))
        tokens, wanted = list(begin.tokens[skipped:]), min(begin.gamma or gamma, gamma)
        return DraftSession(peer, at, terms, tokens, gamma=wanted, skipped=skipped, dense=begin.dense)

    @property
    def id(self) -> str:
        """The session's name."""
        return self.at.session

    @property
    def committed(self) -> int:
        """How many tokens are committed."""
        return self.at.base - self.skipped

    @property
    def pending(self) -> list[int]:
        """Tokens that have to run before the next one can be drafted."""
        return self.tokens[self.kv.length :]

    @property
    def newest_known(self) -> NamedSelection | None:
        """The newest selection that the target holds, or will have received before the next announcement."""
        if self.present is None or self.present.selection is None:
            return self.reference
        return (self.at.epoch, self.at.round), self.present.selection

    @property
    def is_reading(self) -> bool:
        """Whether it has so much to read before it drafts that this is done apart: its prompt, as a rule."""
        few = _CATCHING_UP if self.at.round else _FEW_ROUNDS * (self.terms.most_gamma + 1)
        return len(self.tokens) - self.kv.length > few

    @property
    def has_states(self) -> bool:
        """Whether the target has run all its tokens, where the draft is a head, which reads the states of that."""
        return self.kv.target is None or self.kv.target.length >= len(self.tokens)

    @property
    def waits_for_grammar(self) -> bool:
        """Whether its grammar is still being compiled."""
        return self.terms.grammar is not None and not self.terms.grammar.ready

    @property
    def may_overlap(self) -> bool:
        """Whether a round is under judgement, the next one is not drafted, and there is room for it."""
        return self.present is not None and self.overlap is None and len(self.tokens) + 1 < self.terms.max_length

    def foresees(self, least: float) -> bool:
        """Return whether at least that share of verdicts is met; every _RETRY-th round is tried in any case."""
        return self.statistics.foresight >= least or (self.at.round + 1) % _RETRY == 0

    def tokens_to_propose(self, base: int) -> int:
        """Return γ, or fewer near the end: the target adds one token, and neither side goes beyond max_length."""
        return max(1, min(self.gamma, self.terms.max_length - base - 1))

    def rules_after(self, branches: Sequence[Branch]) -> RoundRules | None:
        """Return the rules of a round's branches, or of its pending tokens if it has no branches."""
        if self.terms.rules is None:
            return None
        guessed = [[*self.tokens[self.committed : branch.length], branch.token] for branch in branches]
        return RoundRules(self.terms.rules, self.tokens[: self.committed], guessed)

    # Verdicts.

    def apply(self, verdict: Verdict, kv: KVCache) -> bool:
        """Take the verdict on the present round. Return whether it met an outcome that the next round is drafted for.

        A verdict whose base lies before the committed tokens takes back the tokens between. Raises ValueError for one
        whose base lies after them or that skips a round, or if KV to be taken back is shared with another session.
        """
        base = verdict.at.base - self.skipped
        if verdict.at.round != self.at.round + 1:
            raise ValueError(f"verdict opens round {verdict.at.round}, round {self.at.round} is under judgement here")
        if not 0 < base <= self.committed:
            raise ValueError(f"verdict from {base} on, {self.committed} tokens are committed here")
        kv.take_back(self.kv, base)
        met = self._outcome_met(base, verdict.tokens)
        self._take_statistics(verdict, met is not None)
        if verdict.plain:
            self.ready_due = True
        else:
            self.reference = self.newest_known
        self.gamma = min(verdict.gamma or self.gamma, self.terms.most_gamma)
        self.dense = verdict.dense
        self.at = verdict.at._replace(base=verdict.at.base + len(verdict.tokens))
        overlap, self.overlap = self.overlap, None
        if met is not None and overlap is not None:
            self._take_up(overlap, met)
        else:
            self._begin_after(base, verdict.tokens, kv)
        return met is not None

    def _begin_after(self, base: int, tokens: list[int], kv: KVCache) -> None:
        """Have the next round begin after a verdict's tokens, of which KV is kept as far as they were drafted."""
        agree = (drafted == given for drafted, given in zip(self.tokens[base:], tokens, strict=False))
        common = base + sum(takewhile(bool, agree))
        self.tokens[base:] = tokens
        self.present = None
        # The last token is always run again: its logits start the next round.
        self.cut_kv(kv, min(self.kv.length, common, len(self.tokens) - 1))

    def _outcome_met(self, base: int, tokens: list[int]) -> DraftedOutcome | None:
        """Return the outcome of the overlap that a verdict's tokens are."""
        end = self.committed + len(tokens)
        if self.overlap is None or base < self.committed:
            return None
        for outcome in self.overlap.outcomes:
            if outcome.base != end or outcome.token != tokens[-1]:
                continue
            assumed = self.tokens[self.committed : end - 1]
            if outcome.alternative is not None:
                assumed[-1:] = [outcome.alternative]
            if assumed == tokens[:-1]:
                return outcome
        return None

    def _take_up(self, overlap: DraftedRound, met: DraftedOutcome) -> None:
        """Make the round drafted for the outcome that was met the present one."""
        drafted = met.drafted
        if met.alternative is not None:
            self.tokens[met.base - 2] = met.alternative
        self.tokens[met.base - 1 :] = [met.token, *drafted.tokens[: drafted.proposed]]
        self.present = DraftedRound(
            overlap.base, [met], overlap.seconds, overlap.selection, overlap.coded, overlap.coded_from
        )
        self.kv.length = met.base + drafted.run
        if met.source != met.base - 1:
            self.moved = MovedKV(met.source, met.base - 1, drafted.run + 1)

    def _take_statistics(self, verdict: Verdict, met: bool) -> None:
        if verdict.plain or self.present is None:
            return
        drafted = self.present.drafted
        if self.overlap is None:  # had there been one outcome, it would have been the likeliest
            met = verdict.tokens == drafted.tokens
        self.statistics.note(drafted.proposed, verdict.accepted, met)

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
        """Committed tokens whose KV, if they have any, is in its place."""
        return self.committed if self.moved is None else min(self.committed, self.moved.target)
