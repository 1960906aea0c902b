"""Targets and drafts on a clock of their own, in one process: the services' own logic, over scripted models.

What a step would take is computed from what it runs; meanwhile the others go on. Verifiers, drafters, prefix indices,
reports and their events are the product's; gRPC, processes and the time that Python takes are left out.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any
from unittest.mock import patch

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from draft_service.steps import DraftStep
from specahead.config import DraftSettings, TargetSettings
from specahead.lab.benchmarks.scripted import ScriptedRunner, scripted_plan
from specahead.wire.messages import Open, Report, ServedEvent
from target_service.orphaned_sessions import OrphanedSessions
from target_service.reporting import Reporter
from target_service.session import DraftPeer
from target_service.verifier import Verifier

_WIRE_SECONDS = 0.0003  # of an event, between two services
_BEAT_SECONDS = 1.0


class VirtualClock:
    """The time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_in(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something happen later."""
        heappush(self._queue, (self.now + seconds, next(self._numbers), act))

    def run(self, while_true: Callable[[], bool]) -> None:
        """Let happen what is due, as long as a condition holds and there is anything."""
        with self._stands_for_time():
            while self._queue and while_true():
                self.now, _, act = heappop(self._queue)
                act()

    @contextmanager
    def _stands_for_time(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in ("monotonic", "perf_counter"):
                stack.enter_context(patch.object(time, name, lambda: self.now))
            yield


@dataclass(frozen=True)
class StepTimes:
    """Seconds that a step takes: in any case, for each round of a session, and for each prompt token."""

    step: float
    round: float
    token: float

    def of(self, rounds: int, tokens: int) -> float:
        """Return the seconds of a step."""
        return self.step + self.round * rounds + self.token * tokens


class Service:
    """A verifier or drafter and its step loop."""

    def __init__(self, clock: VirtualClock, actor: Verifier | Drafter, seconds: Callable[[Any], float]) -> None:
        self.actor: Any = actor
        self._clock, self._seconds = clock, seconds
        self._busy = False
        self.after_step: Callable[[], None] = lambda: None

    def wake(self) -> None:
        """Begin a step if none is running and there is something to do."""
        if self._busy:
            return
        step = self.actor.plan_step()
        self._busy = step is not None
        if step is not None:
            self._clock.call_in(self._seconds(step), partial(self._finish, step))
        elif (seconds := self.actor.next_deadline()) is not None:
            self._clock.call_in(seconds, self.wake)

    def _finish(self, step: Any) -> None:
        self.actor.finish_step(step, self.actor.execute(step))
        self._busy = False
        self.after_step()
        self.wake()


class VirtualTarget:
    """A target as an orchestrator sees it. on_event, on_report: told of what it says."""

    def __init__(
        self,
        clock: VirtualClock,
        settings: TargetSettings,
        pages: int,
        times: StepTimes,
        on_event: Callable[[ServedEvent], None],
        on_report: Callable[[Report], None],
    ) -> None:
        self.verifier = Verifier(ScriptedRunner(errs=False, pages=pages), scripted_plan(), settings)
        self.service = Service(
            clock, self.verifier, lambda step: times.of(len(step.rounds), sum(count for _, count in step.prompt_tokens))
        )
        self._clock, self._on_report = clock, on_report
        self._emit = lambda event: clock.call_in(_WIRE_SECONDS, partial(on_event, event))
        prefixes = self.verifier.runner.kv.pool.prefixes
        orphans = OrphanedSessions(0)  # of no other orchestrators
        self._reporter = Reporter(self.verifier.admission, self.verifier.reading, prefixes, self._emit, orphans)
        self.service.after_step = self._report
        clock.call_in(0.0, self._beat)

    def open(self, request: Open) -> None:
        """Ask for a session."""
        self._clock.call_in(_WIRE_SECONDS, partial(self._receive, request))

    def _receive(self, request: Open) -> None:
        self._reporter.opens += 1
        self.verifier.admission.open(request, self._emit)
        self.service.wake()

    def _report(self) -> None:
        for report in self._reporter.due():
            self._clock.call_in(_WIRE_SECONDS, partial(self._on_report, report))

    def _beat(self) -> None:
        self._report()
        self._clock.call_in(_BEAT_SECONDS, self._beat)


def attach_draft(
    clock: VirtualClock, targets: list[VirtualTarget], settings: DraftSettings, pages: int, times: StepTimes
) -> None:
    """Start a draft that drafts for all these targets."""
    drafter = Drafter(ScriptedRunner(errs=True, pages=pages), scripted_plan(), settings)

    def seconds(step: DraftStep) -> float:
        return times.of(len(step.rounds), sum(len(item.tokens) for item in step.inputs))

    service = Service(clock, drafter, seconds)
    for target in targets:
        _link(clock, target, drafter, service)


def _link(clock: VirtualClock, target: VirtualTarget, drafter: Drafter, service: Service) -> None:
    """Let a target and a draft send each other events."""

    def to_draft(event: Any) -> None:
        drafter.receive(draft_end, event)
        service.wake()

    def to_target(event: Any) -> None:
        target.verifier.protocol.receive(target_end, event)
        target.service.wake()

    draft_end = TargetPeer(lambda event: clock.call_in(_WIRE_SECONDS, partial(to_target, event)))
    target_end = DraftPeer("draft", lambda event: clock.call_in(_WIRE_SECONDS, partial(to_draft, event)))
    drafter.attach(draft_end)
    target.verifier.protocol.attach(target_end)
