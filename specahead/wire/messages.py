"""What draft, target and orchestrator say to each other, as plain types. wire/convert.py maps them to protobuf."""

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


@dataclass(frozen=True)
class Hello:
    """One side of the handshake. All but `peer` and `model` must agree.

    vocab_size: ids that the side computes logits of: those of its tokenizer, however far its model is padded.
    """

    peer: str
    model: str
    vocab_size: int
    tokenizer_hash: str
    plan_hash: str
    gamma: int
    block_size: int
    protocol_version: int = PROTOCOL_VERSION

    def mismatch(self, other: "Hello") -> str | None:
        """What differs, naming both sides; None if they fit."""
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
    """Says that its sender lives; every second, in all streams between services (specahead/wire/streams.py)."""


@dataclass(frozen=True)
class Proposal:
    """Tokens for a round behind `assumed_token`, which is the last committed one, or will be if the verdict falls so.

    `supports` has one entry a token, or none if the draft is greedy.
    """

    at: At
    assumed_token: int
    tokens: list[int]
    supports: list[Support] = field(default_factory=list)
    draft_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Proposals:
    """All proposals for a round, one for each outcome of the verdict before it that was drafted for.

    Proposal i begins at position at.base + offsets[i], behind assumed_tokens[i]. It has counts[i] tokens; `tokens` has
    those of all proposals, one after another. support_counts: entries of the distribution of each token, empty if the
    draft is greedy; support_ids (uint32) and support_probs (float32) have the entries of all tokens. selection: the
    announcement, the blocks that the round is to read of those before at.base (wire/selection_codec.py); empty: none.
    """

    at: At
    offsets: list[int]
    assumed_tokens: list[int]
    counts: list[int]
    tokens: list[int]
    support_counts: list[int]
    support_ids: np.ndarray
    support_probs: np.ndarray
    draft_seconds: float = 0.0
    selection: bytes = b""

    @property
    def outcomes(self) -> list[tuple[int, int]]:
        """Where each proposal begins, and the token that it assumes before."""
        return [(self.at.base + offset, token) for offset, token in zip(self.offsets, self.assumed_tokens, strict=True)]

    def behind(self, base: int, assumed_token: int) -> Proposal | None:
        """Return the proposal that begins at position `base` behind that token, None if there is none."""
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
    """How many sessions a draft drafts for other targets than the one that it tells."""

    other_sessions: int


@dataclass(frozen=True)
class Begin:
    """gamma: tokens to draft a round; 0: as many as the handshake says. dense: announce nothing for now. draws_own:
    whether the target keeps the tokens that it draws itself, so that the draft is to draw by the same numbers.
    """

    at: At
    tokens: list[int]
    sampling: Sampling
    max_length: int
    method: str  # whose announcements are wanted; empty: none
    prompt_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    grammar: str = ""
    traceparent: str = ""  # W3C; empty: not traced
    gamma: int = 0
    dense: bool = False
    draws_own: bool = False


@dataclass(frozen=True)
class Verdict:
    """`at.base` is where `tokens` start, of which those behind it that were committed are taken back; `at.epoch` and
    `at.round` are the next round's.

    gamma, dense: as of Begin, for rounds that are not drafted yet.
    """

    at: At
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


@dataclass(frozen=True)
class Open:
    """alternatives: likely tokens that are told with each log probability. grammar: the source of one that the
    generated text must follow (engine.grammars); empty: none. resumed: whether the session was accepted before, here or
    on a target that is lost; the limit of the queue does not apply to it then.
    """

    session: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    stop_token_ids: list[int]
    sampling: Sampling
    exactness: Exactness
    sparsity: str = ""  # method of an approximate session; empty: the plan's
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    alternatives: int = 0
    grammar: str = ""
    traceparent: str = ""  # W3C; empty: not traced
    caller: str = ""
    choice: int = 0
    client: str = ""
    resumed: bool = False


@dataclass(frozen=True)
class Abort:
    session: str


@dataclass(frozen=True)
class Commit:
    """One round's outcome; `at` is the position before it.

    logprobs: of each token, if asked for. prompt_logprobs: in the first, of the prompt's tokens but its first.
    screening_drafted, screening_accepted: of each round that sparse attention has screened since the last commit.
    screened: how many tokens of such rounds this round was to confirm, the first of its tokens; confirmed: how many of
    them it did.
    """

    at: At
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    finish_reason: FinishReason = FinishReason.NONE
    kv_tokens_read: int = 0
    kv_tokens_total: int = 0
    kv_tokens_fetched: int = 0
    cached_tokens: int = 0
    sparse_prompt_tokens: int = 0
    queue_seconds: float = 0.0
    preemptions: int = 0
    announced_bytes: int = 0
    stale_rounds: int = 0
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    screening_drafted: list[int] = field(default_factory=list)
    screening_accepted: list[int] = field(default_factory=list)
    screened: int = 0
    confirmed: int = 0

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Tokens drafted and accepted in each round that it tells of."""
        return [*zip(self.screening_drafted, self.screening_accepted, strict=True), (self.drafted, self.accepted)]


@dataclass(frozen=True)
class Closed:
    session: str
    code: int
    message: str


@dataclass(frozen=True)
class CallerUsage:
    """What a caller uses through other orchestrators: requests that run, tokens since it was told last."""

    caller: str
    requests: int
    tokens_used: int


@dataclass(frozen=True)
class Report:
    """What an orchestrator is told of a target in order to choose among several; see protos/control.proto."""

    number: int = 0
    opens: int = 0
    sessions: int = 0
    waiting: int = 0
    free_places: int = 0
    free_kv_pages: int = 0
    queue_places: int = 0
    unread_tokens: int = 0
    tokens_per_second: float = 0.0
    queue_seconds: float = 0.0
    indexed: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    kv_pages: int = 0
    draining: bool = False
    left: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    usage: list[CallerUsage] = field(default_factory=list)


@dataclass(frozen=True)
class ServiceStatus:
    peer: str
    pid: int
    attached: list[str]
    refusal: str
    counters: dict[str, float]
    gauges: dict[str, float]
    version: str = ""


@dataclass(frozen=True)
class SessionReads:
    """Which blocks a round of a session read, by layer; see protos/control.proto.

    read, fetched: [layers * columns]; the latter empty where KV has no tiers. at.base is 0 where no round is known yet.
    """

    at: At
    layers: int
    kv_heads: int
    block_size: int
    blocks: int
    blocks_per_column: int
    read: list[int]
    fetched: list[int]


DraftEvent = Proposals | Ready | Decline | Resync | Load
TargetEvent = Begin | Verdict | End | Refusal
ServeRequest = Open | Abort
ServedEvent = Commit | Closed | Report
