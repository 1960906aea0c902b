"""The record of every open session: what was committed, round by round, each round exactly once.

Pure bookkeeping. The ledger outlives the target: what it holds is enough to open a session again elsewhere.
"""

from collections import Counter, deque
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any

from specahead.engine.sampling.distributions import Sampling
from specahead.wire.messages import Commit, Exactness, FinishReason, Open

LATEST_ROUNDS = 64  # of a session: long ones would have more objects than a garbage collection should look at


class LedgerError(Exception):
    """A commit that does not continue what the ledger holds."""


@dataclass
class SpeculationTotals:
    """Sums over a session's rounds, as a client sees them. rounds: with a proposal; plain_rounds: without.

    rounds_by_gamma: rounds that drafted 0, 1, 2 ... tokens. screening_rounds: those that sparse attention has screened.
    uncalibrated: whether what was read was chosen by a plan that nobody calibrated for the pair.
    Fields that a commit has as well are sums of those, drafted and accepted with those of screening rounds.
    """

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    rounds_by_gamma: list[int] = field(default_factory=list)
    stale_rounds: int = 0
    announced_bytes: int = 0
    kv_tokens_read: int = 0
    kv_tokens_total: int = 0
    kv_tokens_fetched: int = 0
    sparse_prompt_tokens: int = 0
    queue_seconds: float = 0.0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    screening_rounds: int = 0
    screened: int = 0
    confirmed: int = 0
    uncalibrated: bool = False

    @property
    def kv_read_fraction(self) -> float:
        return self.kv_tokens_read / self.kv_tokens_total if self.kv_tokens_total else 1.0

    @property
    def kv_fetched_fraction(self) -> float:
        """Of the KV that was read: what had to come from host memory."""
        return self.kv_tokens_fetched / self.kv_tokens_read if self.kv_tokens_read else 0.0

    def summary(self) -> dict[str, Any]:
        """All sums and fractions by name."""
        fractions = {"kv_read_fraction": self.kv_read_fraction, "kv_fetched_fraction": self.kv_fetched_fraction}
        return asdict(self) | fractions

    def plus(self, other: "SpeculationTotals") -> "SpeculationTotals":
        """Return the sums over the rounds of both."""
        mine, theirs = asdict(self), asdict(other)
        lists = "accepted_per_position", "rounds_by_gamma"
        pairs = {name: zip_longest(mine.pop(name), theirs.pop(name), fillvalue=0) for name in lists}
        sums: dict[str, Any] = {name: value + theirs[name] for name, value in mine.items()}
        sums["uncalibrated"] = self.uncalibrated or other.uncalibrated
        sums |= {name: [a + b for a, b in pair] for name, pair in pairs.items()}
        return SpeculationTotals(**sums)

    def add(self, commit: Commit) -> None:
        for drafted, accepted in commit.rounds:
            self.rounds += drafted > 0
            self.plain_rounds += drafted == 0
            self.accepted_per_position += [0] * (drafted - len(self.accepted_per_position))
            self.rounds_by_gamma += [0] * (drafted + 1 - len(self.rounds_by_gamma))
            self.rounds_by_gamma[drafted] += 1
            for position in range(accepted):
                self.accepted_per_position[position] += 1
        self.screening_rounds += len(commit.screening_drafted)
        self.drafted += sum(commit.screening_drafted)
        self.accepted += sum(commit.screening_accepted)
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(commit, name))


_SUMMED = {each.name for each in fields(SpeculationTotals)} & {each.name for each in fields(Commit)}


@dataclass
class Record:
    """A session. tokens: the prompt, then what is committed; latest: the last LATEST_ROUNDS of its rounds, each once.

    Of a round's drafted tokens those beyond the accepted ones were rejected, and their KV was rolled back.
    logprobs: how many likely tokens are told beside each token with its log probability, None if there are no log
    probabilities. caller: the name of the key that it was opened with, empty where no key is asked for. request: the id
    of the client's request, of which it is choice number `choice`. refused_by: the targets that had no place for it.
    """

    session: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    stop_token_ids: list[int]
    sampling: Sampling
    exactness: Exactness
    sparsity: str = ""
    logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    grammar: str = ""
    traceparent: str = ""  # W3C, of its request's span; empty if that is not sampled
    caller: str = ""
    client: str = ""  # with whose other requests it shares places
    request: str = ""
    choice: int = 0
    latest: deque[Commit] = field(default_factory=lambda: deque(maxlen=LATEST_ROUNDS))
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)
    finish_reason: FinishReason = FinishReason.NONE
    cached_tokens: int = 0  # of the prompt, whose KV the target had already
    refused_by: set[str] = field(default_factory=set)
    resumptions: int = 0  # times it was opened on another target since it last got a token

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def resumed(self) -> bool:
        """Whether a target had accepted it before the one that it is opened on next."""
        return self.resumptions > 0 or len(self.tokens) > self.prompt_tokens

    def to_open(self) -> Open:
        """The request that opens this session on a target, at its start or where it stands."""
        return Open(
            session=self.session,
            tokens=list(self.tokens),
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            stop_token_ids=list(self.stop_token_ids),
            sampling=self.sampling,
            exactness=self.exactness,
            sparsity=self.sparsity,
            wants_logprobs=self.logprobs is not None,
            wants_prompt_logprobs=self.wants_prompt_logprobs and not self.latest,
            alternatives=self.logprobs or 0,
            grammar=self.grammar,
            traceparent=self.traceparent,
            caller=self.caller,
            choice=self.choice,
            client=self.client,
            resumed=self.resumed,
        )


class Ledger:
    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.counters: Counter[str] = Counter()

    def open(self, record: Record) -> None:
        if record.session in self.records:
            raise LedgerError(f"session {record.session} is in the ledger already")
        self.records[record.session] = record

    def apply(self, commit: Commit) -> Record | None:
        """Write a round down; None if it is a repeat or of a session that is closed.

        Raises LedgerError for a gap, or for a repeat that says something else than the first time.
        """
        record = self.records.get(commit.at.session)
        if record is None:
            self.counters["unknown_session_commits"] += 1
            return None
        base, held = commit.at.base, len(record.tokens)
        if base > held:
            raise LedgerError(f"session {record.session}: a commit at {base}, the ledger holds {held} tokens")
        if base < held or not commit.tokens:
            if record.tokens[base : base + len(commit.tokens)] != commit.tokens:
                raise LedgerError(f"session {record.session}: tokens at {base} differ from those committed before")
            self.counters["repeated_commits"] += 1
            return None
        if not record.latest:
            record.cached_tokens = commit.cached_tokens
        record.tokens += commit.tokens
        record.latest.append(commit)
        record.totals.add(commit)
        record.finish_reason = commit.finish_reason
        record.resumptions = 0
        return record

    def close(self, session: str) -> Record | None:
        return self.records.pop(session, None)
