"""The rows of `specahead bench serve`: as text, printed as they come, and as JSON, written after each."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specahead.lab.benchmarks.agents import AgentsRow
from specahead.lab.benchmarks.agents import report as agents_report
from specahead.lab.benchmarks.arrivals import ArrivalsRow
from specahead.lab.benchmarks.serving.breakdown import Breakdown
from specahead.lab.benchmarks.serving.clients import Figures
from specahead.lab.results import Columns, describe, live_head, live_line, write_json

_WIDTH = 41  # of a row's name


@dataclass(frozen=True)
class Shape:
    """Sessions at once, and prompt tokens of each."""

    sessions: int
    context: int

    @staticmethod
    def parse(text: str) -> "Shape":
        """Read SESSIONSxCONTEXT, as in 8x32768 or 8x32K. Raises ValueError for anything else."""
        sessions, _, context = text.lower().partition("x")
        number, factor = (context[:-1], 1024) if context.endswith("k") else (context, 1)
        if not (sessions.isdecimal() and number.isdecimal() and int(sessions) and int(number)):
            raise ValueError(f"shape {text!r}: expected SESSIONSxCONTEXT, as in 8x32768 or 8x32K")
        return Shape(int(sessions), int(number) * factor)

    def __str__(self) -> str:
        return f"{self.sessions}x{self.context}"


@dataclass(frozen=True)
class Way:
    """How a row's sessions are served."""

    mode: str
    """none: the target alone; else the sessions' exactness."""
    speculation: str = ""
    """Overrides of how the services speculate, as JSON; empty: none, as users start them."""

    def __str__(self) -> str:
        return "no draft" if self.mode == "none" else f"{self.mode} {self.speculation}".strip()


@dataclass(frozen=True)
class PromptRow:
    """All prompts of a shape, read at once by the target alone; two tokens are generated."""

    sessions: int
    context: int
    seconds: float
    """Until the last prompt is read."""
    first_token_p50: float
    first_token_p99: float


@dataclass(frozen=True)
class ServeRow:
    """Sessions of one shape, served in one way."""

    shape: Shape
    way: Way
    figures: Figures
    of_none: float | None
    """Tokens a second over those of the target alone."""
    breakdown: Breakdown | None
    drafted_after: float
    """Seconds of runs before until nearly all rounds were drafted; in a shape's first row the draft reads prompts."""


_COLUMNS: Columns[ServeRow] = {
    " " * _WIDTH: lambda row: str(row.way).ljust(_WIDTH),
    "sessions": lambda row: str(row.shape.sessions),
    "context": lambda row: str(row.shape.context),
    "tokens/s": lambda row: f"{row.figures.tokens_a_second:.1f}",
    "x none": lambda row: f"{row.of_none:.2f}" if row.of_none else "",
    "first p50": lambda row: f"{row.figures.first_token_p50:.1f}",
    "first p99": lambda row: f"{row.figures.first_token_p99:.1f}",
    "gap p50": lambda row: f"{row.figures.gap_p50:.2f}",
    "gap p99": lambda row: f"{row.figures.gap_p99:.2f}",
    "token": lambda row: f"{row.figures.token_p50:.2f}",
    "a round": lambda row: f"{row.figures.tokens_a_round:.2f}",
    " read": lambda row: f"{row.figures.kv_read:.3f}",
    "fetched": lambda row: f"{row.figures.kv_fetched:.2%}",
    " draft": lambda row: f"{row.figures.draft:.2f}",
    "verify": lambda row: f"{row.figures.verify:.2f}",
    "  wait": lambda row: f"{row.figures.wait:.2f}",
}


@dataclass
class Results:
    """What was measured so far."""

    head: dict[str, str]
    """What is printed before the rows, by name."""
    file: str | None = None
    """Where everything is written as JSON."""
    prompts: list[PromptRow] = field(default_factory=list)
    rows: list[ServeRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    agents: list[dict[str, Any]] = field(default_factory=list)
    """Rows of agents, each with the way that they were served."""
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    """Rows of requests that came at random, likewise."""
    starts: list[dict[str, float]] = field(default_factory=list)
    """Seconds until each service of each deployment served."""

    def begin(self) -> None:
        """Print what comes before the rows."""
        print(f"{describe(self.head)}\n\n{live_head(_COLUMNS)}", flush=True)

    def add_prompts(self, row: PromptRow) -> None:
        self.prompts.append(row)
        print(
            f"{'prompts':<{_WIDTH}}  {row.sessions:>8}  {row.context:>7}  read in {row.seconds:.2f} s, "
            f"{row.sessions * row.context / row.seconds:.0f} tokens/s; first token p50 {row.first_token_p50:.0f} ms, "
            f"p99 {row.first_token_p99:.0f} ms",
            flush=True,
        )
        self._write()

    def add(self, row: ServeRow) -> None:
        self.rows.append(row)
        print(live_line(_COLUMNS, row))
        if row.breakdown:
            print(f"{'':<{_WIDTH}}  {describe_breakdown(row.breakdown)}")
        print(end="", flush=True)
        self._write()

    def add_agents(self, way: Way, rows: Sequence[AgentsRow], shares: Mapping[str, float]) -> None:
        """shares: where the target's time went, of all rows together."""
        self.agents += [{"way": str(way), "shares": shares, **asdict(row)} for row in rows]
        went = ", ".join(f"{what} {share:.1%}" for what, share in shares.items())
        print(f"agents, {way}\n{agents_report(rows)}\n{went}".rstrip(), flush=True)
        self._write()

    def add_arrivals(self, way: Way, rows: Sequence[ArrivalsRow]) -> None:
        """Keep rows that are printed already."""
        self.arrivals += [{"way": str(way), **asdict(row)} for row in rows]
        self._write()

    def has_agents(self, way: Way) -> bool:
        """Return whether agents were measured in a way."""
        return any(row["way"] == str(way) for row in self.agents)

    def fail(self, what: str, error: Exception) -> None:
        """Keep why a part has no row."""
        self.failures.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
        print(f"FAILED {self.failures[-1]}", flush=True)
        self._write()

    def rate_of(self, shape: Shape, way: Way) -> float | None:
        """Return the tokens a second of a row that was measured."""
        found = [row.figures.tokens_a_second for row in self.rows if (row.shape, row.way) == (shape, way)]
        return found[0] if found else None

    def _write(self) -> None:
        measured = {name: getattr(self, name) for name in ("prompts", "rows", "agents", "arrivals")}
        others = {"written": time.strftime("%F %T"), "starts": self.starts, "failures": self.failures}
        write_json(self.file, self.head | measured | others)


def describe_breakdown(breakdown: Breakdown) -> str:
    """Return one line: what a mean round waits for, in milliseconds, and how idle the models are."""
    parts = breakdown.parts
    shown = " + ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in vars(parts).items())
    idle = f"target {breakdown.target_idle:.1%}, draft {breakdown.draft_idle:.1%}"
    if breakdown.device_idle is not None:
        idle = f"device {breakdown.device_idle:.1%}, {breakdown.device_idle * parts.whole:.2f} ms of a round"
    return (
        f"a round of {parts.whole:.2f} ms = {shown} ({breakdown.rounds} rounds); idle: {idle}; "
        f"verdicts met {breakdown.met:.1%}"
    )


LEGEND = """\
Tokens/s: of all sessions, while all generate; x none: over those without a draft. The rest in ms. First: request to
first message, prompts found again. Gap: between two messages of a session. Token: a session's mean time a token, p50.
A round: tokens. Read: share of the KV; fetched: of that, from the host. Draft, verify, wait: means of a round; a
draft that has a GPU of its own runs beside the others."""
