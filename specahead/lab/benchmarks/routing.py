"""`specahead bench routing`: how well targets are chosen for the requests of a real trace.

A discrete simulation: four targets and two drafts on virtual time (virtual_cluster.py). The orchestrator's own code
chooses a target for each session by the targets' own reports. Times of steps are set (see _times), not measured: real
processes would take hours, and would measure the machine's cores.
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from unittest.mock import patch

from orchestrator.sessions.routing import ANSWER_TOKENS, TargetView, choose
from specahead.config import DraftSettings, TargetSettings
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.sampling.distributions import Sampling
from specahead.lab.benchmarks.request_trace import BLOCK, TracedRequest, load_requests
from specahead.lab.benchmarks.virtual_cluster import StepTimes, VirtualClock, VirtualTarget, attach_draft
from specahead.lab.results import Columns, describe, describe_run, live_head, live_line, processor, write_json
from specahead.wire.messages import Closed, Commit, Exactness, Open, ServedEvent

_CHUNK = 8192  # prompt tokens of a step


@dataclass(frozen=True)
class RoutingRow:
    """The whole trace."""

    requests: int
    hit_rate: float
    """Share of all prompt tokens whose KV was found."""
    first_token_p50: float
    """Seconds from a request to its first token."""
    first_token_p99: float
    spread: float
    """Sessions of the busiest target over the mean."""
    simulated_in: float
    """Seconds on this machine."""


def run(flags: argparse.Namespace) -> None:
    """Replay, print the table, and write it to the JSON file if one is named.

    Raises ValueError for a trace that is none and for a scale that is not allowed, OSError for a missing file.
    """
    if BLOCK // PAGE_SIZE % flags.scale:
        raise ValueError(f"scale {flags.scale}: a block of {BLOCK} tokens must stay whole pages: 1, 2, 4, 8, 16 or 32")
    requests = load_requests(Path(flags.trace), flags.requests)
    head = describe_run(flags, processor()) | {"requests": str(len(requests))}
    print(f"{describe(head)}\n{live_head(_COLUMNS)}")
    row = _replay(requests, flags)
    print(live_line(_COLUMNS, row), flush=True)
    write_json(flags.json, head | {"rows": [row]})


_COLUMNS: Columns[RoutingRow] = {
    " hits": lambda row: f"{row.hit_rate:.1%}",
    "first token p50": lambda row: f"{row.first_token_p50:.3f} s",
    "      p99": lambda row: f"{row.first_token_p99:.3f} s",
    "busiest": lambda row: f"{row.spread:.2f}x",
    "  took": lambda row: f"{row.simulated_in:.0f} s",
}


def _times(scale: int) -> tuple[StepTimes, StepTimes]:
    """Return what steps of target and draft take: about those of 8b and 1b on H200s, at the trace's own lengths.

    A round stands for `scale` rounds, a token for as many tokens.
    """
    return StepTimes(0.004, 0.0015 * scale, scale / 25_000), StepTimes(0.002, 0.001 * scale, scale / 150_000)


class _Replay:
    """A run of the trace. firsts: seconds to the first token of each request. cached: prompt tokens found."""

    def __init__(self, requests: list[TracedRequest], flags: argparse.Namespace) -> None:
        self.clock = VirtualClock()
        self.firsts: dict[str, float] = {}
        self.cached = self.prompt_tokens = 0
        self._scale = flags.scale
        self._came: dict[str, float] = {}
        self._left = len(requests)
        self.views = [TargetView(f"target-{number}") for number in range(flags.targets)]
        self.routed = dict.fromkeys((view.name for view in self.views), 0)
        target_times, draft_times = _times(flags.scale)
        pages, chunk = flags.kv_tokens // flags.scale // PAGE_SIZE, _CHUNK // flags.scale
        limits = {"max_context": 1 << 17, "prefill_chunk": chunk}
        settings = TargetSettings(max_queued=1 << 20, draft_timeout=5.0, **limits)
        self.targets = {
            view.name: VirtualTarget(self.clock, settings, pages, target_times, self._take, view.take)
            for view in self.views
        }
        targets, of_draft = [*self.targets.values()], DraftSettings(max_sessions=512, **limits)
        for _ in range(flags.drafts):  # whose pages are never the bottleneck
            attach_draft(self.clock, targets, of_draft, pages * flags.targets, draft_times)
        for number, request in enumerate(requests):
            self.clock.call_in(request.at, partial(self._send, f"{number}", request))

    def _send(self, name: str, request: TracedRequest) -> None:
        tokens = request.prompt(self._scale)
        view = choose(self.views, tokens)
        self.routed[view.name] += 1
        self._came[name] = self.clock.now
        self.prompt_tokens += len(tokens)
        answer = max(1, request.answer_tokens // self._scale)
        opened = Open(name, tokens, len(tokens), answer, [], Sampling(0.0), Exactness.EXACT)
        self.targets[view.name].open(opened)

    def _take(self, event: ServedEvent) -> None:
        if isinstance(event, Closed):
            raise ValueError(f"request {event.session} was refused: {event.message}")
        if isinstance(event, Commit):
            name = event.at.session
            if name not in self.firsts:
                self.firsts[name] = self.clock.now - self._came[name]
                self.cached += event.cached_tokens
            self._left -= bool(event.finish_reason)

    def run(self) -> None:
        """Run until all requests have their answers."""
        self.clock.run(lambda: self._left > 0)


def _replay(requests: list[TracedRequest], flags: argparse.Namespace) -> RoutingRow:
    """Return the figures of the requests, which come as they came in the trace."""
    started = time.perf_counter()
    with patch("orchestrator.sessions.routing.ANSWER_TOKENS", ANSWER_TOKENS // flags.scale):  # as all lengths
        replay = _Replay(requests, flags)
        replay.run()
    firsts = sorted(replay.firsts.values())
    return RoutingRow(
        len(firsts),
        replay.cached / replay.prompt_tokens,
        median(firsts),
        quantiles(firsts, n=100)[-1],
        max(replay.routed.values()) * flags.targets / len(firsts),
        time.perf_counter() - started,
    )
