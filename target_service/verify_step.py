"""A step of the target, and each session's part of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.engine.steps.device_chain import Imposed
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.outputs import StepUnderWay
from specahead.wire.messages import Proposal, Proposer
from target_service.session import TargetSession


@dataclass
class VerifyRound:
    """A session's part of a step: a proposal to verify, or none to decode one token plainly."""

    session: TargetSession
    proposal: Proposal | None
    """The draft's; None where the target proposes by itself, or nothing is proposed."""
    input: SequenceInput
    wait_seconds: float
    """How long the target has waited for the proposal."""
    drafting_cost: float = 0.0
    """Tokens that have to be accepted to pay for drafting in the step itself; 0: nothing is drafted there."""
    is_void: bool = False
    """Whether what the round gives counts for nothing."""
    imposed: Imposed | None = None
    """The verdict that replaces the round's own, once it was made (target_service.commit)."""

    @property
    def held(self) -> int:
        """How many tokens it is to confirm, between the first one and the proposed ones."""
        return self.input.held

    @property
    def proposed(self) -> list[int]:
        """The tokens to verify, whoever proposed them; those drafted in the step are there once it has run."""
        return self.input.tokens[self.input.drafted_from + self.held :]

    @property
    def proposer(self) -> Proposer:
        """Who proposed its tokens."""
        if self.proposal is not None:
            return Proposer.DRAFT
        if not self.proposed:
            return Proposer.NOBODY
        return Proposer.SELF if self.drafting_cost else Proposer.LOOKUP

    @property
    def is_guessed(self) -> bool:
        """Whether the session's own text proposed where there is a draft, too."""
        return self.session.first_guess is not None and self.proposal is None and bool(self.proposed)

    @property
    def screens(self) -> bool:
        """Whether what it accepts is held back until a dense pass confirms it."""
        return self.input.screens


@dataclass
class VerifyStep:
    """What one pass of the model runs."""

    rounds: list[VerifyRound] = field(default_factory=list)
    prefills: list[tuple[TargetSession, SequenceInput]] = field(default_factory=list)
    """Parts of prompts that no round follows in this step."""
    asynchronous: bool = False
    """Whether executing it only launches it; the next step waits for it (device_chain.py)."""
    before: "VerifyStep | None" = None
    """The asynchronous step that this one waits for."""
    under_way: StepUnderWay | None = None
    """The launched pass, if it is asynchronous."""
    began: float = 0.0
    """When it was launched, by time.perf_counter."""

    @property
    def inputs(self) -> list[SequenceInput]:
        """The inputs of the pass: those of the rounds, then those of prompts."""
        return [item.input for item in self.rounds] + [item for _, item in self.prefills]

    @property
    def prompt_tokens(self) -> list[tuple[TargetSession, int]]:
        """How many tokens of its prompt each session reads, those whose round follows in the same pass included."""
        ends = [(item.session, item.input.drafted_from - 1) for item in self.rounds if item.input.ends_prompt]
        return ends + [(session, len(given.tokens)) for session, given in self.prefills]

    @property
    def work(self) -> list[tuple[SequenceKV, int]]:
        """How many tokens the pass adds to each sequence."""
        return [(item.kv, item.rows) for item in self.inputs]

    @property
    def sessions(self) -> Iterator[TargetSession]:
        """The sessions that take part."""
        yield from (item.session for item in self.rounds)
        yield from (session for session, _ in self.prefills)

    @property
    def ending(self) -> "VerifyStep | None":
        """The step whose results executing this one gives: the one before, if that is asynchronous."""
        return self.before or (None if self.asynchronous else self)


@dataclass(frozen=True)
class VerifyResult:
    """What the pass gave that has ended (VerifyStep.ending)."""

    outputs: list[SequenceOutput]
    """Of each round, in order."""
    prompts: list[list[TokenLogprobs]]
    """For each part of a prompt, the log probabilities of the next tokens, if requested."""
    seconds: float
    """What the pass took."""
