"""The messages between draft, target and orchestrator, as plain types. wire/convert.py maps them to protobuf."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from specahead.engine.sampling.distributions import Sampling, Support
from specahead.engine.sampling.logprobs import TokenLogprobs

PROTOCOL_VERSION = 8


class At(NamedTuple):
    """Where in a session's life a message belongs; see protos/speculation.proto."""

    session: str
    epoch: int
    round: int
    base: int


class Exactness(IntEnum):
    EXACT = 1
    APPROXIMATE = 2


class FinishReason(IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3


class Proposer(IntEnum):
    """Who proposes the tokens of a round."""

    NOBODY = 0
    LOOKUP = 1  # the session's own text
    SELF = 2  # the target, over a small share of its KV
    DRAFT = 3  # a draft model


@dataclass(frozen=True)
class Hello:
    """One side of the handshake. All values but `peer` and `model` must agree."""

    peer: str
    model: str
    vocab_size: int
    """Token ids of the side's tokenizer, however far its model is padded."""
    tokenizer_hash: str
    plan_hash: str
    gamma: int
    block_size: int
    protocol_version: int = PROTOCOL_VERSION

    def mismatch(self, other: "Hello") -> str | None:
        """Return which values differ, naming both sides; None if all agree."""
        names = ("protocol_version", "vocab_size", "tokenizer_hash", "plan_hash", "gamma", "block_size")
        differing = [
            f"{name}: {self.peer} ({self.model}) has {getattr(self, name)!r}, "
            f"{other.peer} ({other.model}) has {getattr(other, name)!r}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]
        return "; ".join(differing) or None


@dataclass(frozen=True)
class Beat:
    """A sign of life, sent every second in all streams between services (specahead/wire/streams.py)."""


@dataclass(frozen=True)
class Proposal:
    """Tokens proposed for a round."""

    at: At
    assumed_token: int
    """The last committed token before the round; if its verdict is still out, the one that the draft assumes."""
    tokens: list[int]
    supports: list[Support] = field(default_factory=list)
    """The distribution of each token; none if the draft is greedy."""
    draft_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Proposals:
    """All proposals for a round: one for each outcome of the verdict before it that the draft prepared for."""

    at: At
    offsets: list[int]
    """Proposal i begins at position at.base + offsets[i]."""
    assumed_tokens: list[int]
    """The token before each proposal, as in `Proposal`."""
    counts: list[int]
    """How many tokens each proposal has."""
    tokens: list[int]
    """The tokens of all proposals, one after another."""
    support_counts: list[int]
    """How many entries the distribution of each token has; empty if the draft is greedy."""
    support_ids: np.ndarray
    """uint32, the entries of all tokens, one after another."""
    support_probs: np.ndarray
    """float32, like support_ids."""
    draft_seconds: float = 0.0
    selection: bytes = b""
    """The announcement: which of the blocks before at.base the round reads (wire/selection_codec.py). Empty: none."""

    @property
    def outcomes(self) -> list[tuple[int, int]]:
        """Where each proposal begins, and the token that it assumes before it."""
        return [(self.at.base + offset, token) for offset, token in zip(self.offsets, self.assumed_tokens, strict=True)]

    def after(self, base: int, assumed_token: int) -> Proposal | None:
        """Return the proposal that begins at position `base` after that token, None if there is none."""
        outcomes = self.outcomes
        if (base, assumed_token) not in outcomes:
            return None
        index = outcomes.index((base, assumed_token))
        start = sum(self.counts[:index])
        end = start + self.counts[index]
        supports = []
        if self.support_counts:
            first = sum(self.support_counts[:start])
            for count in self.support_counts[start:end]:
                ids, probs = self.support_ids[first : first + count], self.support_probs[first : first + count]
                supports.append(Support(ids.astype(np.int64), probs))
                first += count
        at = At(self.at.session, self.at.epoch, self.at.round, base)
        return Proposal(at, assumed_token, self.tokens[start:end], supports, self.draft_seconds)


@dataclass(frozen=True)
class Ready:
    at: At


@dataclass(frozen=True)
class Decline:
    session: str
    reason: str


@dataclass(frozen=True)
class Resync:
    session: str


@dataclass(frozen=True)
class Load:
    """What else a draft has to do."""

    other_sessions: int
    """Sessions that it drafts for targets other than the receiver."""


@dataclass(frozen=True)
class Begin:
    """A session that a draft is to draft for."""

    at: At
    tokens: list[int]
    sampling: Sampling
    max_length: int
    announces: bool = False
    """Whether announcements are wanted."""
    prompt_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    grammar: str = ""
    gamma: int = 0
    """Tokens to draft a round; 0: as many as the handshake says."""
    dense: bool = False
    """Whether to announce nothing for now."""
    draws_own: bool = False
    """Whether the target keeps only tokens that it draws itself, so that the draft draws by the same uniforms."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round, as a draft needs it. `gamma` and `dense` are those of Begin, for rounds to come."""

    at: At
    """`base` is the position of the first of `tokens`; tokens committed from there on are taken back. `epoch` and
    `round` are those of the next round."""
    accepted: int
    tokens: list[int]
    plain: bool
    gamma: int = 0
    dense: bool = False


@dataclass(frozen=True)
class End:
    session: str


@dataclass(frozen=True)
class Refusal:
    expected: At
    reason: str


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What a session's output has to be or to bring, beside its tokens."""

    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    alternatives: int = 0
    """Likely tokens that are sent with each log probability."""
    grammar: str = ""
    """The source of a grammar that the generated text must follow (engine.sampling.grammars); empty: none."""


@dataclass(frozen=True)
class Open(OutputOptions):
    """A session that a target is to serve."""

    session: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    stop_token_ids: list[int]
    sampling: Sampling
    exactness: Exactness
    caller: str = ""
    choice: int = 0
    client: str = ""
    resumed: bool = False
    """Whether a target accepted the session before, this one or one that is lost. Then the queue's limit does not
    apply."""


@dataclass(frozen=True)
class Abort:
    session: str


@dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """What rounds have read and how long they took; see protos/control.proto."""

    kv_tokens_read: int = 0
    kv_tokens_total: int = 0
    kv_tokens_fetched: int = 0
    queue_seconds: float = 0.0
    preemptions: int = 0
    announced_bytes: int = 0
    stale_rounds: int = 0
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    audited_tokens: int = 0
    total_variation: float = 0.0
    kl_divergence: float = 0.0
    same_greedy: int = 0
    rounds_made_exact: int = 0

    def plus(self, other: "RoundFigures") -> "RoundFigures":
        """Return the sums over the rounds of both."""
        return RoundFigures(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Commit:
    """The outcome of a round, as the ledger needs it."""

    at: At
    """The position before the round."""
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    finish_reason: FinishReason = FinishReason.NONE
    figures: RoundFigures = RoundFigures()
    cached_tokens: int = 0
    """In the first commit: tokens of the prompt that were found in the KV."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, if they are asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """In the first commit: of the prompt's tokens but its first, if they are asked for."""
    screening_drafted: list[int] = field(default_factory=list)
    """Tokens drafted in each round that sparse attention has screened since the last commit."""
    screening_accepted: list[int] = field(default_factory=list)
    """Tokens that the screening accepted in each of these rounds."""
    screened: int = 0
    """How many of the round's tokens, the first ones, had been screened and waited to be confirmed."""
    confirmed: int = 0
    """How many of these the round confirmed."""
    proposer: Proposer = Proposer.NOBODY

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Tokens drafted and accepted in each round since the last commit."""
        return [*zip(self.screening_drafted, self.screening_accepted, strict=True), (self.drafted, self.accepted)]


@dataclass(frozen=True)
class Closed:
    session: str
    code: int
    message: str


@dataclass(frozen=True, kw_only=True)
class TargetLoad:
    """How busy a target is; see protos/control.proto."""

    sessions: int = 0
    waiting: int = 0
    free_places: int = 0
    free_kv_pages: int = 0
    kv_pages: int = 0
    queue_places: int = 0
    unread_tokens: int = 0
    tokens_per_second: float = 0.0
    queue_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report(TargetLoad):
    """What an orchestrator needs to know about a target to choose among several; see protos/control.proto."""

    number: int = 0
    opens: int = 0
    indexed: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    draining: bool = False
    left: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServiceStatus:
    peer: str
    pid: int
    attached: list[str]
    refusal: str
    counters: dict[str, float]
    gauges: dict[str, float]
    version: str = ""


DraftEvent = Proposals | Ready | Decline | Resync | Load
TargetEvent = Begin | Verdict | End | Refusal
ServeRequest = Open | Abort
ServedEvent = Commit | Closed | Report
