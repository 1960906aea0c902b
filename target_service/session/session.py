"""One session as the target sees it. The target is the authority on committed tokens."""

import time
from dataclasses import dataclass, field

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.wire.errors import ServiceError
from specahead.wire.messages import At, Begin, Closed, Proposal
from target_service.policy import PLAIN, Pace
from target_service.policy.lookup import FirstGuess, PromptLookup
from target_service.policy.pace import TRIAL
from target_service.screening import Screening
from target_service.session.asked import Asked
from target_service.session.draft import DraftState, RoundKey
from target_service.session.reading import Reading


@dataclass
class RoundStats:
    """Statistics of the round in the making; reset with every commit."""

    cached_tokens: int = 0
    """Tokens of the prompt that were found in the KV."""
    queue_seconds: float = 0.0
    """Time spent waiting for room."""
    preemptions: int = 0
    """How often the session gave way."""
    stale_rounds: int = 0
    """Proposals that came for rounds that were over."""
    announced_bytes: int = 0
    """Bytes of announcements."""
    prefill_seconds: float = 0.0
    """Time of the steps that read its prompt."""
    waiting_since: float | None = None
    """When the target began to wait for the round's proposal, by time.monotonic; None if it does not."""


@dataclass(eq=False)
class TargetSession:
    """All that the target knows of a session."""

    asked: Asked
    """What it asked for."""
    tokens: list[int]
    """The prompt, the committed tokens and the held ones. All but the last have KV once they are read."""
    queued_at: float
    """When it last began to wait for room, by time.monotonic."""
    deterministic: bool
    """Whether the target draws its own tokens where it judges for good, whatever was proposed or screened. Then
    sessions read everything in passes of their own.
    """
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens but its first, as far as it is read; None if not requested, or sent already."""
    kv: SequenceKV = field(default_factory=SequenceKV)
    epoch: int = 0
    """Rises with each outcome that the draft did not foresee."""
    round: int = 0
    begins: bool = True
    """Whether nothing was committed since it was admitted: its first token waits for no draft."""
    reading: Reading = field(default_factory=Reading)
    """How it reads its KV."""
    screening: Screening | None = None
    """What it holds back until it is confirmed; None: nothing ever."""
    lookup: PromptLookup | None = None
    """What proposes tokens of its own text; None: nothing does."""
    first_guess: FirstGuess | None = None
    """What its own text proposes before its draft is asked, or in the draft's place; None: the text proposes only where
    there is no draft, or never.
    """
    pace: Pace = field(default_factory=Pace)
    """How its next round is made."""
    draft: DraftState = field(default_factory=DraftState)
    """What its draft has sent."""
    stats: RoundStats = field(default_factory=RoundStats)

    @property
    def id(self) -> str:
        """Its name."""
        return self.asked.id

    @property
    def at(self) -> At:
        """The position of the current round."""
        return At(self.id, self.epoch, self.round, len(self.tokens))

    @property
    def key(self) -> RoundKey:
        """The current round."""
        return self.epoch, self.round

    # Its tokens and their KV.

    @property
    def unread(self) -> int:
        """Committed tokens without KV, not counting the last one, which the next round runs; nor are held ones."""
        return self.confirmed - 1 - self.kv.length

    @property
    def room(self) -> int:
        """How many tokens it may still propose, with one after them."""
        return self.asked.max_length - len(self.tokens) - 1

    @property
    def confirmed(self) -> int:
        """How many of its tokens are committed for good; the later ones are held."""
        return len(self.tokens) if self.screening is None else self.screening.confirmed

    @property
    def holds(self) -> bool:
        """Whether it holds tokens that are not confirmed yet."""
        return len(self.tokens) > self.confirmed

    @property
    def awaits_its_end(self) -> bool:
        """Whether its text ends with tokens that are still to be confirmed."""
        return self.screening is not None and self.screening.ends

    @property
    def kv_is_dense(self) -> bool:
        """Whether all KV of its rounds comes of passes that read everything."""
        return self.reading.is_dense if self.screening is None else not self.holds

    @property
    def announces(self) -> bool:
        """Whether announcements decide over what its next round reads: it takes some, and is not read wholly."""
        return self.reading.is_announced and not self.reads_wholly

    @property
    def reads_wholly(self) -> bool:
        """Whether all of its KV is read: it is exact, or short for its budget."""
        reader = self.reading.reader
        return reader is None or reader.plan.reads_wholly(len(self.tokens))

    # Who proposes.

    @property
    def is_paused(self) -> bool:
        """Whether it pauses by itself, because proposals for it did not pay."""
        return self.pace.pause.lasts(len(self.tokens))

    @property
    def is_guessing(self) -> bool:
        """Whether its next round is guessed, without its draft."""
        return self.first_guess is not None and bool(self.first_guess.tokens)

    @property
    def awaits_draft(self) -> bool:
        """Whether its next round waits for a proposal of its draft."""
        expects = self.pace.next_round.gamma > 0 and self.draft.peer is not None and self.draft.awaited
        return expects and not self.begins and not self.awaits_its_end and self.ready_proposal() is None

    @property
    def goes_alone(self) -> bool:
        """Whether it goes without a draft for now."""
        return not self.pace.next_round.gamma or self.is_guessing

    def pause(self) -> None:
        """Go on without a draft for a while, since it has sent something wrong."""
        self.pace.pause.begin(len(self.tokens))
        self.pace.trial, self.pace.next_round = TRIAL, PLAIN

    def look_up(self, gamma: int) -> list[int]:
        """Return up to `gamma` tokens that its own text proposes: tokens that followed its last ones earlier, before
        any held ones. Where it guesses before its draft does, return that guess.
        """
        if self.first_guess is not None:
            return self.first_guess.tokens
        if self.lookup is None or self.is_paused or self.awaits_its_end:
            return []
        return self.lookup.propose(self.tokens, min(gamma, self.room), stays=self.confirmed)

    def guess(self) -> None:
        """Guess the next tokens before the draft is asked. Nothing is guessed after held tokens: the text that is
        looked up in only grows.
        """
        if self.first_guess is None or self.lookup is None:
            return
        if self.holds:
            self.first_guess.forget()
        else:
            self.first_guess.guess(self.lookup, self.tokens, self.room, alone=not self.pace.next_round.gamma)

    # Its draft.

    def begin(self) -> Begin:
        """Return the message with which a draft begins to draft for this session, from where it stands."""
        asked, grammar = self.asked, self.asked.grammar
        gamma, dense = self.draft_request
        return Begin(
            at=self.at,
            tokens=list(self.tokens),
            sampling=asked.sampling,
            max_length=asked.max_length,
            announces=self.reading.is_announced,
            prompt_tokens=asked.prompt_tokens,
            stop_token_ids=sorted(asked.stop_token_ids),
            grammar=grammar.source if grammar is not None else "",
            gamma=gamma,
            dense=dense,
            draws_own=self.deterministic,
        )

    @property
    def draft_request(self) -> tuple[int, bool]:
        """The tokens that its draft is to propose in a round, and whether without announcements."""
        plan = self.pace.next_round
        return plan.gamma, self.reading.is_announced and not (plan.sparse and self.announces)

    def ready_proposal(self) -> Proposal | None:
        """Return the proposal for the current round, if it is here."""
        proposals = self.draft.proposals.get(self.key)
        return None if proposals is None else proposals.after(len(self.tokens), self.tokens[-1])

    def came_late(self, at: At) -> bool:
        """Return whether a message for this round was made before the last verdict, which raised the epoch."""
        last = self.draft.last_judged
        return last is not None and last[0] == (at.epoch, at.round - 1) and (at.epoch + 1, at.round) == self.key

    def foresaw(self, base: int, token: int) -> bool:
        """Return whether the next round is proposed for the outcome that `token` is the last before `base`."""
        proposals = self.draft.proposals.get((self.epoch, self.round + 1))
        return proposals is not None and (base, token) in proposals.outcomes

    def forget_draft(self) -> None:
        """Go on without the present draft: nothing that it has sent counts any more."""
        if self.draft.peer is not None:
            self.draft.peer.sessions.discard(self.id)
        self.draft = DraftState()
        self.epoch += 1

    # Its rounds.

    def commit(self, tokens: list[int], agreed: bool, judged: Proposal | None) -> None:
        """Append tokens and go to the next round; the epoch rises unless the draft foresaw the outcome.

        judged: the proposal that was verified, if the draft that made it still stands behind it.
        """
        draft = self.draft
        if judged is not None and self.key in draft.announced:
            draft.announced_before = {self.key: draft.announced[self.key]}
        self.tokens += tokens
        self.round += 1
        self.epoch += not agreed
        draft.foreseen = agreed
        draft.advance(self.epoch, self.round)
        self.begins = False
        self.stats = RoundStats()

    def give_way(self) -> None:
        """Wait for room again, with the tokens that are committed and nothing else."""
        if self.screening is not None:
            self.screening.drop(self.tokens)
        self.reading.begin_anew()
        self.begins = True
        self.stats.waiting_since = self.pace.committed_at = None
        self.stats.preemptions += 1
        self.queued_at = time.monotonic()

    def fail(self, error: ServiceError) -> None:
        """Tell the session's owner why it ends."""
        self.asked.emit(Closed(self.id, error.status.value[0], str(error)))
