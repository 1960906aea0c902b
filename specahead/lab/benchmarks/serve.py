"""`specahead bench serve`: tokens a second and latencies of the real services, without and with speculation.

Target and draft have random weights in the shapes of real models, so what they say means nothing: acceptance is
imposed, and approximate sessions read by a uniform plan. Services are processes of their own, without Ray, started as
users start them, with the models alone; each --speculation adds rows by other services that it overrides. The target
serves alone first, then a draft joins it; prompts are read once and found again by prefix.
"""

import argparse
import contextlib
import itertools
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import torch

from specahead.config import Speculation
from specahead.lab.benchmarks import agents, arrivals
from specahead.lab.benchmarks.flags import add_agents_flags
from specahead.lab.benchmarks.processes import children
from specahead.lab.benchmarks.serving.clients import MOST_PLAIN, TRIED_ROUNDS, Figures, Load, run_clients
from specahead.lab.benchmarks.serving.deployment import Deployment, Pair, Room, note
from specahead.lab.benchmarks.serving.imposed import CONFIRMATION
from specahead.lab.benchmarks.serving.rows import LEGEND, PromptRow, Results, ServeRow, Shape, Way
from specahead.lab.results import describe_run, processor

_ATTEMPTS = 3  # at a run in which all sessions generate at some time
_ADAPTED = 4  # runs after which a policy has tried all plans
_AGENTS_CONTEXT = 36_000 + 10_000  # tokens of an agent's first prompt (bench agents), and by which they grow, at most
_MOST_ARRIVED = 64  # requests that come at random and have a place at once; others are queued
_MARGIN = 64  # tokens of room beside prompt and output
MOST_GAMMA = 8  # tokens that services propose a round, at most, unless they are overridden


@dataclass(frozen=True)
class _Run:
    """What all parts of one command share."""

    flags: argparse.Namespace
    results: Results


def run(flags: argparse.Namespace) -> None:
    """Measure, print each row as it comes, and write all of them to the JSON file if one is named.

    Raises ValueError for flags that give nothing to measure, ChildProcessError if a service or a row failed.
    """
    shapes = [Shape.parse(text) for text in flags.shapes]
    overrides = [read_speculation(text) for text in flags.speculation]
    _check(flags, overrides)
    pairs = [_pair(flags, each) for each in overrides]
    head = describe_run(flags, processor()) | {
        "models": f"target {flags.target_shape}, draft {flags.draft_shape}, random weights, "
        f"imposed acceptance {flags.acceptance} a token, confirmation {CONFIRMATION} a screened token",
        "services": _describe_services(pairs[0]),
    }
    measured = _Run(flags, Results(head, flags.json))
    results = measured.results
    results.begin()
    if "none" in flags.modes and flags.draft not in ("model", "none"):
        _measure_deployment(measured, replace(pairs[0], draft="none", speculation={}), shapes)
    for pair in pairs:
        _measure_deployment(measured, pair, shapes)
    print(f"\n{LEGEND}")
    if results.failures:
        raise ChildProcessError(f"{len(results.failures)} parts failed: {'; '.join(results.failures)}")


def read_speculation(text: str) -> dict[str, Any]:
    """Return overrides of how services speculate. Raises SettingsError for other text than JSON of known keys."""
    Speculation().changed(text)
    return dict(json.loads(text))


def most_gamma(speculation: Mapping[str, Any]) -> int:
    """Return how many tokens a round proposes, at most."""
    return speculation.get("gamma") or speculation.get("max_gamma") or MOST_GAMMA


def _pair(flags: argparse.Namespace, speculation: dict[str, Any]) -> Pair:
    """Return the services to measure. Raises ValueError for devices that do not fit them."""
    together = flags.draft == "model" and flags.placement != "apart"
    gpus, ranks = torch.cuda.device_count(), flags.tensor_parallel_size
    pair = Pair(
        target_shape=flags.target_shape,
        draft_shape=flags.draft_shape,
        acceptance=flags.acceptance,
        budget=flags.budget,
        draft=flags.draft,
        together=together,
        speculation=speculation,
        targets=flags.targets or (max(1, gpus // ranks) if together else 1),
        tensor_parallel_size=ranks,
        quantization=flags.quantization,
        kv_cache_dtype=flags.kv_cache_dtype,
        flags=tuple(shlex.split(flags.flags)),
    )
    wanted = sum(pair.gpu_counts.values())
    return pair.on(flags.gpus or [index % gpus for index in range(wanted if gpus else 0)])


def _describe_services(pair: Pair) -> str:
    """Return the services by name, with what there is to say of targets."""
    ranks = f"; a target has {pair.tensor_parallel_size} GPUs" if pair.tensor_parallel_size > 1 else ""
    return ", ".join(pair.names) + (", each with the draft in it" if pair.together else "") + ranks


def _check(flags: argparse.Namespace, overrides: list[dict[str, Any]]) -> None:
    most = max(map(most_gamma, overrides))
    least = 8 * (most + 1)
    if flags.tokens < least:
        raise ValueError(f"--tokens {flags.tokens}: with {most} proposed a round it takes {least} to time rounds")
    if flags.targets < 0 or flags.part_limit <= 0:
        raise ValueError("--part-limit must be positive, --targets at least 0")
    if flags.draft == "none" and "none" not in flags.modes:
        raise ValueError("--draft none measures targets alone: give none among --modes, or another --draft")
    if not (flags.shapes or flags.agents or flags.arrivals):
        raise ValueError("expected --shapes, --agents or --arrivals to measure")


def _measure_deployment(run: _Run, pair: Pair, shapes: list[Shape]) -> None:
    """Start the services for these shapes and measure all their rows."""
    flags, room = run.flags, _room(run, pair, shapes)
    with tempfile.TemporaryDirectory() as folder, children() as start, _noted_failure(run, "services"):
        deployment = Deployment(start, Path(folder), pair, room, flags.part_limit, flags.breakdown)
        endpoints = deployment.start()
        address = endpoints.grpc
        run.results.starts.append(deployment.start_seconds)
        deployment.wait_until_prepared()
        drafted = [mode for mode in flags.modes if mode != "none" and pair.draft != "none"]
        overridden = json.dumps(dict(pair.speculation)) if pair.speculation else ""
        for way in _ways_of_agents(run, pair, Way("", overridden)):
            _measure_agents(run, deployment, endpoints.http, way)
        known: set[int] = {row.context for row in run.results.prompts}
        deployment.attach_draft(False)
        for shape in shapes:
            with _noted_failure(run, f"{shape}, prompts"):
                _read_prompts(run, address, shape, is_new=shape.context not in known)
                known.add(shape.context)
            alone = Way("none")
            if "none" in flags.modes and pair.draft in ("model", "none") and run.results.rate_of(shape, alone) is None:
                _measure_row(run, deployment, address, shape, alone)
        deployment.attach_draft(True)
        for shape, mode in itertools.product(shapes, drafted):
            _measure_row(run, deployment, address, shape, Way(mode, overridden))
        note("stopping the services")


def _ways_of_agents(run: _Run, pair: Pair, way: Way) -> list[Way]:
    """Return the ways in which these services serve agents that were not measured yet. way: all but the mode."""
    if not run.flags.agents and not run.flags.arrivals:
        return []
    modes, alone = run.flags.modes, Way("none")
    drafted = [] if pair.draft == "none" else [replace(way, mode=mode) for mode in modes if mode != "none"]
    is_new = "none" in modes and pair.draft in ("model", "none") and not run.results.has_agents(alone)
    return [*([alone] if is_new else []), *drafted]


def _measure_agents(run: _Run, deployment: Deployment, url: str, way: Way) -> None:
    """Measure agents that take turns, and requests that come at random, over HTTP."""
    deployment.attach_draft(way.mode != "none")
    asked, parser = run.flags, argparse.ArgumentParser()
    add_agents_flags(parser)
    of_mode = ["none", "exact", "approximate"].index(way.mode)  # no mode finds another's prompts
    flags = ["--url", url, "--exactness", "exact" if way.mode == "none" else way.mode, "--seed", str(of_mode)]
    flags += ["--timeout", str(asked.part_limit)]
    with _noted_failure(run, f"agents, {way}"):
        note(f"agents, {way}")
        began = time.perf_counter()
        if asked.agents:
            rows, _ = agents.measure(parser.parse_args([*flags, "--agents", *map(str, asked.agents)]))
            run.results.add_agents(way, rows, deployment.time_shares(began) if asked.breakdown else {})
        if asked.arrivals:
            print(f"requests that come at random, {way}")
            flags += ["--arrivals", *map(str, asked.arrivals), "--requests", str(asked.requests)]
            run.results.add_arrivals(way, arrivals.measure(parser.parse_args(flags)))


def _room(run: _Run, pair: Pair, shapes: list[Shape]) -> Room:
    most = max(run.flags.tokens, TRIED_ROUNDS * (most_gamma(pair.speculation) + 1))  # that a session generates
    longest = max((shape.context + most for shape in shapes), default=0)
    sessions = max([shape.sessions for shape in shapes] + run.flags.agents, default=1)
    if run.flags.agents:  # which warm up by 16 requests at once
        sessions, longest = max(sessions, 16), max(longest, _AGENTS_CONTEXT)
    if run.flags.arrivals:
        sessions, longest = max(sessions, _MOST_ARRIVED), max(longest, arrivals.MOST_PROMPT + arrivals.MOST_ANSWER)
    return Room(-(-sessions // pair.targets), longest + _MARGIN)


@contextlib.contextmanager
def _noted_failure(run: _Run, what: str) -> Iterator[None]:
    """Go on after a part that failed, and say so at the end."""
    try:
        yield
    except (grpc.RpcError, grpc.FutureTimeoutError, OSError, ValueError) as error:
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


def _measure_row(run: _Run, deployment: Deployment, address: str, shape: Shape, way: Way) -> None:
    """Measure one row."""
    gamma = most_gamma(deployment.pair.speculation)
    with _noted_failure(run, f"{shape}, {way}"):
        exactness = "approximate" if way.mode == "approximate" else "exact"

        def measure(tokens: int, attempt: int) -> Figures:
            name = f"{shape} {way} {attempt}"
            return run_clients(address, _load(run, name, shape, tokens, exactness, max(0, attempt)))

        def measure_all_at_once() -> Figures:
            """Measure a run in which at some time all sessions generate; where the machine does other things, they may
            have come one after the other.
            """
            for attempt in range(_ATTEMPTS):
                if (figures := measure(run.flags.tokens, attempt)).tokens_a_second:
                    return figures
            raise ValueError(f"at no moment did all {shape.sessions} sessions generate; give more --tokens")

        drafted_after = 0.0
        if way.mode == "none":
            measure(2 * (gamma + 1), -1)
        else:
            tries = None if deployment.pair.speculation.get("gamma") else _ADAPTED
            drafted_after = _wait_until_drafted(
                run, lambda: measure(TRIED_ROUNDS * (gamma + 1), -1), f"{shape}, {way}", tries
            )
        figures = measure_all_at_once()
        note(f"{shape}, {way}: {figures.tokens_a_second:.0f} tokens/s")
        breakdown = None
        if run.flags.breakdown:
            with _noted_failure(run, f"{shape}, {way}, breakdown"):
                served = deployment.pair.draft == "model" and way.mode != "none"
                drafted = served and figures.plain_share < 1  # the target may decide against it
                draft = "draft" if drafted else ""
                breakdown = deployment.breakdown(figures.name, deployment.targets[0], draft)
        none = run.results.rate_of(shape, Way("none"))
        of_none = figures.tokens_a_second / none if none and way.mode != "none" else None
        run.results.add(ServeRow(shape, way, figures, of_none, breakdown, drafted_after))


def _wait_until_drafted(run: _Run, try_rounds: Callable[[], Figures], what: str, most: int | None) -> float:
    """Run sessions until the draft has read the prompts and hardly a round is decoded plainly; return the seconds.

    most: runs at most, where the target decides whether to draft. Raises ValueError if it takes longer than a part may.
    """
    began = time.monotonic()
    limit = began + run.flags.part_limit
    tries = itertools.count(1)
    while (share := try_rounds().plain_share) > MOST_PLAIN and next(tries) != most:
        if time.monotonic() > limit:
            raise ValueError(f"after {time.monotonic() - began:.0f} s {share:.0%} of the rounds are still not drafted")
    seconds = time.monotonic() - began
    note(f"{what}: drafted after {seconds:.1f} s")
    return seconds


def _load(run: _Run, name: str, shape: Shape, tokens: int, exactness: str, seed: int) -> Load:
    return Load(name, shape.sessions, shape.context, tokens, exactness, seed, run.flags.part_limit)
