"""`specahead bench serve`: tokens a second and latencies of the real services, without and with speculation.

Target and draft have random weights in the shapes of real models, so that what they say means nothing: acceptance is
imposed, and what is read follows a uniform plan or a recorded trace. Services are processes of their own, without Ray.
The target serves alone first, then a draft joins it; prompts are read once and found again by prefix. The target's KV
may lie in tiers (docs/architecture.md).
"""

import argparse
import contextlib
import itertools
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import grpc

from orchestrator.cluster.directory import name_services
from specahead.lab.benchmarks.processes import children
from specahead.lab.benchmarks.serving.clients import MOST_PLAIN, TRIED_ROUNDS, Figures, Load, run_clients
from specahead.lab.benchmarks.serving.controls import Controls
from specahead.lab.benchmarks.serving.deployment import Deployment, Pair, Room, note
from specahead.lab.benchmarks.serving.rows import LEGEND, PromptRow, Results, ServeRow, Shape, Way

if TYPE_CHECKING:
    from specahead.lab.benchmarks.read_trace import ReadTrace

_ALONE = ("none", "self")  # modes of a target without a draft
_ATTEMPTS = 3  # at a run
_ADAPTED = 4
_MARGIN = 64  # tokens of room beside prompt and output


@dataclass(frozen=True)
class _Run:
    """What all parts of one command share. shapes: in the order of their rows. trace: what is replayed, if anything.

    ends: when, on time.monotonic's clock, the command has to end.
    """

    flags: argparse.Namespace
    pair: Pair
    shapes: list[Shape]
    trace: "ReadTrace | None"
    results: Results
    ends: float

    def seconds(self) -> float:
        """Return how long the next part may take."""
        return max(1.0, min(self.flags.part_limit, self.ends - time.monotonic()))


def run(flags: argparse.Namespace) -> None:
    """Measure, print each row as it comes, and write all of them to the JSON file if one is named.

    Raises ValueError for flags that give nothing to measure, TimeoutError at the limit, ChildProcessError if a service
    or a row failed.
    """
    shapes = [Shape.parse(text) for text in flags.shapes]
    _check(flags)
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "models": f"target {flags.target_shape}, draft {flags.draft_shape}, random weights, "
        f"imposed acceptance {flags.acceptance} a token",
        "command": shlex.join(["specahead", *_command(flags)]),
    }
    pair = Pair(
        flags.target_shape,
        flags.draft_shape,
        _most_drafted(flags),
        flags.acceptance,
        flags.budget,
        flags.read_share,
        max(flags.branches),
        ahead=flags.ahead == "yes",
        adaptive=flags.gamma == "auto",
        target_flags=(*shlex.split(flags.target_flags), *(["--draft", "self"] if "self" in flags.modes else [])),
        draft_flags=tuple(shlex.split(flags.draft_flags)),
        draft_in_target=flags.draft_in_target,
        gpus=_gpus(flags),
    )
    ends = time.monotonic() + flags.limit if flags.limit else float("inf")
    measured = _Run(flags, pair, shapes, _trace(flags), Results(head, flags.json), ends)
    results = measured.results
    results.begin()
    with _time_limit(flags.limit):
        _measure_deployment(measured, shapes, hot=0.0)
        for shape in shapes if flags.hot else []:
            _measure_deployment(measured, [shape], flags.hot)
    print(f"\n{LEGEND}")
    if flags.plot:
        from specahead.lab.benchmarks.serving.plot import plot_rows  # matplotlib is loaded only where it is asked for

        plot_rows(results.rows, Path(flags.plot))
    if results.failures:
        raise ChildProcessError(f"{len(results.failures)} parts failed: {'; '.join(results.failures)}")


def _gpus(flags: argparse.Namespace) -> dict[str, int]:
    """The device of each service by name. Raises ValueError for another number of them than there are services."""
    names = [*name_services("target", flags.targets), *([] if flags.draft_in_target else ["draft"])]
    if flags.gpus and len(flags.gpus) != len(names):
        raise ValueError(f"--gpus {' '.join(map(str, flags.gpus))}: expected one each for {', '.join(names)}")
    return dict(zip(names, flags.gpus or [], strict=False))


def _command(flags: argparse.Namespace) -> list[str]:
    """The command line, as far as it says what was measured."""
    words = ["bench", "serve"]
    for name, value in vars(flags).items():
        if value in (None, False, 0, "") or name in ("run", "command", "bench", "json", "plot"):
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def _check(flags: argparse.Namespace) -> None:
    if not 0 <= flags.hot < 1:
        raise ValueError(f"--hot {flags.hot}: expected a share of the KV, less than 1")
    most = _most_drafted(flags)
    least = 8 * (most + 1)
    if flags.tokens < least:
        raise ValueError(f"--tokens {flags.tokens}: with gamma {most} it takes {least} for rounds to be timed")
    if "self" in flags.modes and {*flags.modes} - {"self", "none"}:
        raise ValueError(f"--modes {' '.join(flags.modes)}: self is measured beside none alone")
    if flags.draft_in_target and ("self" in flags.modes or flags.hot):
        raise ValueError("--draft-in-target is measured with KV on the GPU, and not beside self")
    if flags.targets < 1:
        raise ValueError(f"--targets {flags.targets}: expected at least 1")
    if min(*flags.waves, *flags.branches, flags.repeat) < 1 or flags.part_limit <= 0 or flags.limit < 0:
        raise ValueError("--waves, --branches, --repeat and --part-limit must be positive, --limit at least 0")


def _most_drafted(flags: argparse.Namespace) -> int:
    """Tokens drafted a round, at most. Raises ValueError for what is no number."""
    return flags.max_gamma if flags.gamma == "auto" else int(flags.gamma)


def _trace(flags: argparse.Namespace) -> "ReadTrace | None":
    """The trace that approximate sessions read by, if any."""
    from specahead.lab.benchmarks.read_trace import load_reads  # it loads the engine, which takes seconds

    name = flags.replay or ("1/10" if flags.hot and "approximate" in flags.modes else "no")
    return None if name == "no" else next(trace for trace in load_reads() if trace.name == name)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the time is over; 0: never."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the limit of {seconds:g} s is reached; rows so far stand above")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _measure_deployment(run: _Run, shapes: list[Shape], hot: float) -> None:
    """Start the services for these shapes and measure all their rows."""
    flags, room = run.flags, _room(run, shapes, hot)
    with tempfile.TemporaryDirectory() as folder, children() as start, _noted_failure(run, f"services, hot {hot:g}"):
        of_run = run.pair, room, flags.breakdown, bool(run.trace), run.seconds
        deployment = Deployment(start, Path(folder), *of_run, flags.targets, together=True)
        measured = _modes_over_tiers(flags.modes) if hot else flags.modes
        modes = [mode for mode in measured if mode not in _ALONE]
        (address,) = deployment.start(with_draft=bool(modes))
        run.results.starts.append(deployment.start_seconds)
        deployment.wait_until_prepared()
        known: set[int] = set()
        for shape in shapes:
            with _noted_failure(run, f"{shape}, prompts"):
                _read_prompts(run, address, shape, is_new=shape.context not in known and not hot)
                known.add(shape.context)
            for mode in _ALONE:
                if mode in measured:
                    deployment.control(Controls(attached=False, self_drafting=mode == "self"))
                    _measure_row(run, deployment, address, shape, Way(mode, hot=hot))
        for shape in shapes if modes else []:
            replay = _write_replay(run, deployment, shape) if run.trace and "approximate" in modes else ""
            ahead = flags.ahead == "yes" and not flags.draft_in_target
            foresight = flags.foresight if ahead else 0.0  # nobody asks what a verdict will be
            for waves, branches, mode in itertools.product(flags.waves, flags.branches if ahead else [1], modes):
                replayed = bool(replay) and mode == "approximate"
                controls = Controls(waves, branches, replay if replayed else "", foresight=foresight)
                deployment.control(controls)
                _measure_row(run, deployment, address, shape, Way(mode, waves, ahead, branches, hot, replayed))
        note("stopping the services")


def _modes_over_tiers(modes: list[str]) -> list[str]:
    """Return which modes are measured again over tiers: approximate alone if it is asked for, else all."""
    return [mode for mode in modes if mode == "approximate"] or modes


def _room(run: _Run, shapes: list[Shape], hot: float) -> Room:
    longest = max(shape.context for shape in shapes)
    sessions = -(-max(shape.sessions for shape in shapes) // run.flags.targets)
    return Room(sessions, longest + run.flags.tokens + _MARGIN, longest, hot)


@contextlib.contextmanager
def _noted_failure(run: _Run, what: str) -> Iterator[None]:
    """Go on after a part that failed, and say so at the end."""
    try:
        yield
    except (grpc.RpcError, grpc.FutureTimeoutError, ChildProcessError, ValueError) as error:
        run.results.fail(what, error)


def _read_prompts(run: _Run, address: str, shape: Shape, is_new: bool) -> None:
    """Have the target read the prompts of a shape. is_new: none of them was read before, so that it is a row."""
    note(f"{shape}: reading the prompts")
    figures = run_clients(address, _load(run, "prompts", shape, 2, "exact", 0))
    if is_new:
        seconds = figures.all_seconds
        run.results.add_prompts(
            PromptRow(shape.sessions, shape.context, seconds, figures.first_token_p50, figures.first_token_p99)
        )


def _write_replay(run: _Run, deployment: Deployment, shape: Shape) -> str:
    """Lay the trace out for a shape; return the file."""
    from specahead.lab.benchmarks.serving.replay import write_replay  # as in _trace

    file, flags = deployment.folder / f"{shape}.npy", run.flags
    rounds = round(1.5 * flags.tokens / _expected_tokens(flags)) + 10
    blocks = -(-(shape.context + flags.tokens + _MARGIN) // 16)
    assert run.trace is not None
    note(f"{shape}: laying out {rounds} rounds of the trace {run.trace.name}")
    write_replay(file, run.trace, shape.sessions, rounds, run.pair.sparse_rows, blocks)
    return str(file)


def _expected_tokens(flags: argparse.Namespace) -> float:
    """Of a round that is drafted."""
    return sum(flags.acceptance**i for i in range(_most_drafted(flags) + 1))


def _measure_row(run: _Run, deployment: Deployment, address: str, shape: Shape, way: Way) -> None:
    """Measure one row, as often as is asked for."""
    with _noted_failure(run, f"{shape}, {way}"):
        exactness = "approximate" if way.mode == "approximate" else "exact"

        def measure(tokens: int, repeat: int) -> Figures:
            name = f"{shape} {way} {repeat}"
            return run_clients(address, _load(run, name, shape, tokens, exactness, max(0, repeat)))

        def measure_all_at_once(repeat: int) -> Figures:
            """Measure a run in which at some time all sessions generate; where the machine does other things, they may
            have come one after the other.
            """
            for attempt in range(_ATTEMPTS):
                figures = measure(run.flags.tokens, repeat + attempt * run.flags.repeat)
                if figures.tokens_a_second:
                    return figures
            raise ValueError(f"at no moment did all {shape.sessions} sessions generate; give more --tokens")

        drafted_after = 0.0
        if way.mode in _ALONE:
            measure(2 * (run.pair.gamma + 1), -1)
        else:
            drafted_after = _wait_until_drafted(
                run, lambda: measure(TRIED_ROUNDS * (run.pair.gamma + 1), -1), f"{shape}, {way}"
            )
        runs = [measure_all_at_once(repeat) for repeat in range(run.flags.repeat)]
        rates = [figures.tokens_a_second for figures in runs]
        note(f"{shape}, {way}: {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s")
        kept = sorted(runs, key=lambda figures: figures.tokens_a_second)[len(runs) // 2]
        breakdown = None
        if run.flags.breakdown:
            with _noted_failure(run, f"{shape}, {way}, breakdown"):
                drafted = way.mode not in _ALONE and kept.plain_share < 1  # the target may decide against it
                draft = "draft" if drafted else ""
                breakdown = deployment.breakdown(kept.name, deployment.targets[0], draft)
        row = _row(run, shape, way, rates, kept)
        run.results.add(replace(row, breakdown=breakdown, drafted_after=drafted_after))


def _row(run: _Run, shape: Shape, way: Way, rates: list[float], kept: Figures) -> ServeRow:
    """The row of the run that is kept, beside the rows that it is compared with."""
    none = run.results.rate_of(shape, Way("none", hot=way.hot)) or run.results.rate_of(shape, Way("none"))
    resident = run.results.rate_of(shape, replace(way, hot=0.0)) if way.hot else None
    rate = kept.tokens_a_second
    return ServeRow(
        shape=shape,
        way=way,
        runs=rates,
        figures=kept,
        of_none=rate / none if none and way.mode != "none" else None,
        of_resident=rate / resident if resident else None,
    )


def _wait_until_drafted(run: _Run, try_rounds: Callable[[], Figures], what: str) -> float:
    """Run sessions until the draft has read the prompts and hardly a round is decoded plainly; return the seconds.

    Where the target decides whether to draft: _ADAPTED times, in which it has tried all ways. Raises ValueError if it
    takes longer than a part may.
    """
    began = time.monotonic()
    limit = began + run.seconds()
    tries = itertools.count(1)
    while (share := try_rounds().plain_share) > MOST_PLAIN and not (run.pair.adaptive and next(tries) >= _ADAPTED):
        if time.monotonic() > limit:
            raise ValueError(f"after {time.monotonic() - began:.0f} s {share:.0%} of the rounds are still not drafted")
    seconds = time.monotonic() - began
    note(f"{what}: drafted after {seconds:.1f} s")
    return seconds


def _load(run: _Run, name: str, shape: Shape, tokens: int, exactness: str, seed: int) -> Load:
    return Load(name, shape.sessions, shape.context, tokens, exactness, seed, run.seconds())
