"""One session as the target sees it. The target is the authority on committed tokens."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.grammars import GrammarState
from specahead.engine.sampling.logit_rules import LogitRule
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.engine.steps.inputs import ReadMemory, SparsePrompt
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from specahead.wire.errors import ServiceError
from specahead.wire.messages import (
    At,
    Begin,
    Closed,
    Proposal,
    Proposals,
    ServedEvent,
    SessionReads,
    TargetEvent,
    Verdict,
)
from target_service.controller import UNDECIDED, Pace
from target_service.lookup import FirstGuess, PromptLookup
from target_service.round_costs import PLAIN, Choice
from target_service.screening import Screening

RoundKey = tuple[int, int]  # (epoch, round)


@dataclass(eq=False)
class DraftPeer:
    """A draft at the other end of a stream. send: how to send to it. sessions: the names of those it drafts for.
    other_sessions: how many it drafts for other targets, as it has said."""

    name: str
    send: Callable[[TargetEvent], None]
    sessions: set[str] = field(default_factory=set)
    other_sessions: int = 0

    @property
    def load(self) -> int:
        """How many sessions it drafts in all."""
        return len(self.sessions) + self.other_sessions


@dataclass
class RoundStats:
    """Statistics of the round in the making; reset with every commit.

    cached_tokens: of the prompt, that were found in the KV. sparse_prompt_tokens: of the prompt, that were read
    sparsely. queue_seconds: spent waiting for room. preemptions: how
    often the session gave way. waiting_since: when the target began to wait for the round's proposal, None if it does
    not.
    """

    cached_tokens: int = 0
    sparse_prompt_tokens: int = 0
    queue_seconds: float = 0.0
    preemptions: int = 0
    stale_rounds: int = 0
    announced_bytes: int = 0
    prefill_seconds: float = 0.0
    waiting_since: float | None = None


@dataclass(eq=False)
class TargetSession:
    """All that the target knows of a session.

    tokens: the committed ones, the prompt_tokens of the prompt included, and those that are held; KV exists for all but
    the last once they are read. emit: where its commits go. queued_at: when it last began to wait for room. rules: what
    changes its logits; grammar is one of them. logprobs: as of `engine.judging.Drafted`. prompt_logprobs: of the
    prompt's tokens but its first, as far as it is read; None if not asked for, or told already. traceparent: of its
    request, if that is traced. caller, choice: of its request, too: whose it is, and which of the request's choices
    this is. draws_own: whether the target keeps the tokens that it draws itself, whatever is proposed. reader: how an
    approximate session reads; None: everything. prompt: how its prompt is read, but for the end of it; None:
    everything. lookup: what proposes tokens by itself; None: nothing. first_guess: when that does so before a draft;
    None: in place of one. memory: what its KV weighed, if it drafts for itself. screening: what it holds back until it
    is confirmed; None: nothing ever. weighed: the tokens that were committed before the last round that weighed it; 0:
    none has. pace: what is decided about its rounds. next_round: how that is made. committed_at: when its last round
    was finished, if it has run nothing else since. drafted: whether to wait for the draft's proposals. proposals: by
    round; those for the next one assume different outcomes of this one. foreseen: whether the current round was
    proposed before the last verdict. held: what was announced for the round judged last, by its key. last_judged: the
    round judged last, and its verdict. reads_wanted: whether someone wants to look at which blocks the next round
    reads; reads: what the last round that was looked at read. resumed: as of Open.
    """

    id: str
    tokens: list[int]
    prompt_tokens: int
    max_length: int
    stop_token_ids: frozenset[int]
    sampling: Sampling
    emit: Callable[[ServedEvent], None]
    queued_at: float
    rules: tuple[LogitRule, ...] = ()
    grammar: GrammarState | None = None
    logprobs: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    reader: Reader | None = None
    prompt: SparsePrompt | None = None
    lookup: PromptLookup | None = None
    first_guess: FirstGuess | None = None
    memory: ReadMemory | None = None
    screening: Screening | None = None
    weighed: int = 0
    traceparent: str = ""
    caller: str = ""
    client: str = ""  # with whose other sessions it shares places
    choice: int = 0
    resumed: bool = False
    draws_own: bool = False
    kv: SequenceKV = field(default_factory=SequenceKV)
    epoch: int = 0
    round: int = 0
    draft: DraftPeer | None = None
    drafted: bool = False
    pace: Pace = UNDECIDED
    next_round: Choice = PLAIN
    committed_at: float | None = None
    proposals: dict[RoundKey, Proposals] = field(default_factory=dict)
    foreseen: bool = False
    announced: dict[RoundKey, BlockSelection] = field(default_factory=dict)
    held: dict[RoundKey, BlockSelection] = field(default_factory=dict)
    last_judged: tuple[RoundKey, Verdict] | None = None
    stats: RoundStats = field(default_factory=RoundStats)
    reads_wanted: bool = False
    reads: SessionReads | None = None

    @property
    def at(self) -> At:
        """The position of the current round."""
        return At(self.id, self.epoch, self.round, len(self.tokens))

    @property
    def key(self) -> RoundKey:
        """The current round."""
        return self.epoch, self.round

    @property
    def unread(self) -> int:
        """Committed tokens without KV, not counting the last one, which the next round runs; nor are held ones."""
        return self.confirmed - 1 - self.kv.length

    @property
    def confirmed(self) -> int:
        """How many of its tokens are committed for good; those behind them are held."""
        return len(self.tokens) if self.screening is None else self.screening.confirmed

    @property
    def reads_all(self) -> bool:
        """Whether all of its rounds read everything."""
        return self.reader is None or self.reader.method.name == "dense"

    @property
    def kv_is_dense(self) -> bool:
        """Whether all KV of its rounds comes of passes that read everything."""
        return self.reads_all if self.screening is None else not self.holds

    @property
    def awaits_its_end(self) -> bool:
        """Whether its text ends with tokens that are still to be confirmed."""
        return self.screening is not None and self.screening.ends

    @property
    def announced_by(self) -> str:
        """The method whose announcements this session takes; empty if it takes none."""
        return self.reader.method.name if self.reader is not None and self.reader.announced_rows else ""

    @property
    def announces(self) -> bool:
        """Whether announcements decide over what its next round reads: it takes some, and is not read wholly."""
        reader = self.reader
        return reader is not None and reader.announced_rows > 0 and not reader.plan.reads_wholly(len(self.tokens))

    @property
    def is_paused(self) -> bool:
        """Whether nothing is proposed for now, because proposals did not pay."""
        return self.pace.is_paused(len(self.tokens))

    @property
    def known_selections(self) -> dict[RoundKey, BlockSelection]:
        """What an announcement may refer to: of judged rounds, and of one that waits for its judgement."""
        return self.held | self.announced

    def fail(self, error: ServiceError) -> None:
        """Tell the session's owner why it ends."""
        self.emit(Closed(self.id, error.status.value[0], str(error)))

    def begin(self) -> Begin:
        """Return the message with which a draft begins to draft for this session, from where it stands."""
        text = self.prompt_tokens, sorted(self.stop_token_ids), self.grammar.source if self.grammar else ""
        place = self.at, list(self.tokens), self.sampling, self.max_length, self.announced_by
        return Begin(*place, *text, self.traceparent, *self.asked, self.draws_own)

    @property
    def asked(self) -> tuple[int, bool]:
        """What its draft is asked for: so many tokens a round, and whether without announcements."""
        drafted = self.next_round if self.next_round.gamma else self.pace.choice
        return drafted.gamma, bool(self.announced_by) and not (drafted.sparse and self.announces)

    def look_up(self, gamma: int) -> list[int]:
        """Return up to `gamma` tokens that its own text proposes: those that followed its last tokens earlier, before
        any that are held. Where it guesses before its draft does, what it has guessed."""
        if self.first_guess is not None:
            return self.first_guess.tokens
        if self.lookup is None or self.is_paused or self.awaits_its_end:
            return []
        count = min(gamma, self.max_length - len(self.tokens) - 1)
        return self.lookup.propose(self.tokens, count, stays=self.confirmed)

    def guess(self, proposed: int, accepted: int) -> None:
        """Guess what comes next before the draft is asked, behind a round that accepted so many of those tokens that
        were guessed for it. Not behind tokens that are held: the text that is looked up in only grows."""
        if self.first_guess is not None and self.lookup is not None and not self.holds:
            if proposed:
                self.first_guess.note(proposed, accepted, len(self.tokens))
            self.first_guess.guess(self.lookup, self.tokens, self.max_length - len(self.tokens) - 1)

    @property
    def holds(self) -> bool:
        """Whether it holds tokens that are not confirmed yet."""
        return len(self.tokens) > self.confirmed

    @property
    def goes_alone(self) -> bool:
        """Whether it goes without a draft for now."""
        return self.is_paused or self.copies

    @property
    def copies(self) -> bool:
        """Whether its next round is guessed, without its draft."""
        return self.first_guess is not None and bool(self.first_guess.tokens)

    def ready_proposal(self) -> Proposal | None:
        """Return the proposal for the current round, if it is here."""
        proposals = self.proposals.get(self.key)
        return None if proposals is None else proposals.behind(len(self.tokens), self.tokens[-1])

    def came_late(self, at: At) -> bool:
        """Return whether a message for this round was made ahead of the verdict before it, which raised the epoch."""
        before = None if self.last_judged is None else self.last_judged[0]
        return before == (at.epoch, at.round - 1) and (at.epoch + 1, at.round) == self.key

    def foresaw(self, base: int, token: int) -> bool:
        """Return whether the next round is proposed for the outcome that `token` is the last before `base`."""
        ahead = self.proposals.get((self.epoch, self.round + 1))
        return ahead is not None and (base, token) in ahead.outcomes

    def commit(self, tokens: list[int], agreed: bool, judged: Proposal | None) -> None:
        """Append tokens and go to the next round; the epoch rises unless the draft foresaw the outcome.

        judged: the proposal that was verified, if the draft that made it still stands behind it.
        """
        if judged is not None and self.key in self.announced:
            self.held = {self.key: self.announced[self.key]}
        self.tokens += tokens
        self.round += 1
        if not agreed:
            self.epoch += 1
        self.foreseen = agreed
        self.stats = RoundStats()
        if self.announced or self.proposals:
            self.announced = {k: v for k, v in self.announced.items() if self._is_ahead(k)}
            self.proposals = {k: v for k, v in self.proposals.items() if self._is_ahead(k)}

    def _is_ahead(self, key: RoundKey) -> bool:
        return key[0] == self.epoch and key[1] >= self.round

    def give_way(self) -> None:
        """Wait for room again, with the tokens that are committed and nothing else."""
        if self.screening is not None:
            self.screening.drop(self.tokens)
        if self.reader is not None:
            self.reader = self.reader.anew()
        if self.memory is not None:
            self.memory, self.weighed = replace(self.memory, index=None), 0
        self.stats.waiting_since = self.committed_at = None
        self.stats.preemptions += 1
        self.queued_at = time.monotonic()

    def forget_draft(self) -> None:
        """Go on without the present draft: nothing that it has sent counts any more."""
        if self.draft is not None:
            self.draft.sessions.discard(self.id)
        self.draft, self.drafted, self.foreseen = None, False, False
        self.epoch += 1
        self.proposals.clear()
        self.announced.clear()
        self.held.clear()
        self.last_judged = None
