"""The records of all open sessions: their committed rounds, each exactly once.

Pure bookkeeping. The ledger outlives the target, and holds enough to open a session again on another one.
"""

from collections import Counter, deque
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

from specahead.wire.messages import Commit, FinishReason, Open, RoundFigures

LATEST_ROUNDS = 64  # kept of a session: more would make garbage collections long


class LedgerError(Exception):
    """A commit that does not continue the session's record."""


@dataclass
class SpeculationTotals:
    """Sums over a session's rounds, as clients see them."""

    rounds: int = 0
    """With a proposal."""
    plain_rounds: int = 0
    """Without a proposal."""
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    rounds_by_gamma: list[int] = field(default_factory=list)
    """Rounds that drafted 0, 1, 2 ... tokens."""
    figures: RoundFigures = RoundFigures()  # noqa: RUF009 (it is frozen)
    screening_rounds: int = 0
    screened: int = 0
    confirmed: int = 0
    uncalibrated: bool = False
    """Whether the KV to read was selected by a plan that was not calibrated for the pair."""

    @property
    def kv_read_fraction(self) -> float:
        """The share of KV that verification read, 1 without any."""
        figures = self.figures
        return figures.kv_tokens_read / figures.kv_tokens_total if figures.kv_tokens_total else 1.0

    @property
    def kv_fetched_fraction(self) -> float:
        """The share of the KV read that came from host memory."""
        figures = self.figures
        return figures.kv_tokens_fetched / figures.kv_tokens_read if figures.kv_tokens_read else 0.0

    def summary(self) -> dict[str, Any]:
        """Return all sums and fractions by name."""
        fractions = {"kv_read_fraction": self.kv_read_fraction, "kv_fetched_fraction": self.kv_fetched_fraction}
        values = asdict(self)
        figures = values.pop("figures")
        return values | figures | fractions | self.divergence

    @property
    def divergence(self) -> dict[str, float]:
        """How far sparse verification was from dense verification: means over the audited tokens."""
        figures, tokens = self.figures, max(1, self.figures.audited_tokens)
        return {
            "total_variation": figures.total_variation / tokens,
            "kl_divergence": figures.kl_divergence / tokens,
            "same_greedy": figures.same_greedy / tokens if figures.audited_tokens else 1.0,
        }

    def plus(self, other: "SpeculationTotals") -> "SpeculationTotals":
        """Return the sums over the rounds of both."""
        mine, theirs = asdict(self), asdict(other)
        lists = "accepted_per_position", "rounds_by_gamma"
        pairs = {name: zip_longest(mine.pop(name), theirs.pop(name), fillvalue=0) for name in lists}
        del mine["figures"]
        sums: dict[str, Any] = {name: value + theirs[name] for name, value in mine.items()}
        sums["figures"] = self.figures.plus(other.figures)
        sums["uncalibrated"] = self.uncalibrated or other.uncalibrated
        sums |= {name: [a + b for a, b in pair] for name, pair in pairs.items()}
        return SpeculationTotals(**sums)

    def add(self, commit: Commit) -> None:
        """Add the rounds of a commit, screening rounds included."""
        for drafted, accepted in commit.rounds:
            self.rounds += drafted > 0
            self.plain_rounds += drafted == 0
            self.accepted_per_position += [0] * (drafted - len(self.accepted_per_position))
            self.rounds_by_gamma += [0] * (drafted + 1 - len(self.rounds_by_gamma))
            self.rounds_by_gamma[drafted] += 1
            for position in range(accepted):
                self.accepted_per_position[position] += 1
        self.screening_rounds += len(commit.screening_drafted)
        self.drafted += commit.drafted + sum(commit.screening_drafted)
        self.accepted += commit.accepted + sum(commit.screening_accepted)
        self.screened += commit.screened
        self.confirmed += commit.confirmed
        self.figures = self.figures.plus(commit.figures)


@dataclass
class Record:
    """A session: one choice of a client's request."""

    asked: Open
    """As the session is opened the first time. Its tokens grow with `tokens`."""
    request: str = ""
    """The id of the client's request."""
    tokens: list[int] = field(init=False)
    """The prompt, then the committed tokens."""
    latest: deque[Commit] = field(default_factory=lambda: deque(maxlen=LATEST_ROUNDS))
    """The last LATEST_ROUNDS rounds."""
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)
    finish_reason: FinishReason = FinishReason.NONE
    cached_tokens: int = 0
    """Tokens of the prompt whose KV the target had before."""
    refused_by: set[str] = field(default_factory=set)
    """The targets that had no place for it."""
    resumptions: int = 0
    """Times that it was opened on another target since its last token."""

    def __post_init__(self) -> None:
        self.tokens = self.asked.tokens

    @property
    def session(self) -> str:
        """The session's name."""
        return self.asked.session

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return self.asked.prompt_tokens

    @property
    def generated(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.tokens[self.prompt_tokens :]

    @property
    def resumed(self) -> bool:
        """Whether another target has run it before."""
        return self.resumptions > 0 or len(self.tokens) > self.prompt_tokens

    def to_open(self) -> Open:
        """Return the request that opens the session on a target, at its start or where it stands."""
        wants_prompt_logprobs = self.asked.wants_prompt_logprobs and not self.latest
        return replace(
            self.asked, tokens=list(self.tokens), wants_prompt_logprobs=wants_prompt_logprobs, resumed=self.resumed
        )


class Ledger:
    """The records of all open sessions, by name."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.counters: Counter[str] = Counter()

    def open(self, record: Record) -> None:
        """Add a record. Raises LedgerError if there is one of the same name."""
        if record.session in self.records:
            raise LedgerError(f"session {record.session} is in the ledger already")
        self.records[record.session] = record

    def apply(self, commit: Commit) -> Record | None:
        """Add a round to its session and return the record; None for a repeat, or if the session is closed.

        Raises LedgerError for a gap, and for a repeat with other tokens than the first time.
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
        """Remove a record and return it, None if there is none."""
        return self.records.pop(session, None)
