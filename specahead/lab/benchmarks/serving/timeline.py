"""When a service's steps ran and when its messages came: recorded in the service, read by the benchmark.

Services of one machine share the clock (time.perf_counter). What is recorded is kept in memory while sessions run and
written when the last one has ended, a line of JSON at a time.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

RoundKey = tuple[str, int, int]  # session, epoch, round


@dataclass
class StepTimes:
    """One step of a service, in seconds: planned from `planned` on, run in the model's thread from `began` to `ended`,
    done with when `finished`. gpu: seconds of it that the model ran; without a GPU all that the thread took. rounds:
    those that the step drafted or verified. prompts: sessions of which it read a part of the prompt.
    """

    planned: float
    began: float = 0.0
    ended: float = 0.0
    finished: float = 0.0
    gpu: float = 0.0
    rounds: list[RoundKey] = field(default_factory=list)
    prompts: int = 0

    @property
    def gpu_share(self) -> float:
        """The part of the run that the model ran."""
        return min(1.0, self.gpu / (self.ended - self.began)) if self.ended > self.began else 1.0


@dataclass
class Timeline:
    """The steps of a service, and when the first message of a round came: a proposal or a verdict that opens it."""

    steps: list[StepTimes] = field(default_factory=list)
    arrivals: list[tuple[RoundKey, float]] = field(default_factory=list)


class Recorder:
    """Wraps the functions of a step loop. take_rounds: returns the rounds and the number of prompts of planned work.
    is_idle: whether there is no session."""

    def __init__(
        self, file: str, take_rounds: Callable[[Any], tuple[list[RoundKey], int]], is_idle: Callable[[], bool]
    ) -> None:
        self._file, self._take_rounds, self._is_idle = file, take_rounds, is_idle
        self._timeline = Timeline()
        self._clock = graph_clock()
        self._step = StepTimes(0.0)

    def plan(self, plan_step: Callable[[], Any]) -> Any:
        """Plan a step; without one and without sessions, write what was recorded."""
        planned = time.perf_counter()
        work = plan_step()
        if work is None:
            self.rest()
        else:
            self.begin(planned, work)
        return work

    def begin(self, planned: float, work: Any) -> None:
        """Begin with a step that was planned from that time on."""
        rounds, prompts = self._take_rounds(work)
        self._step = StepTimes(planned, rounds=rounds, prompts=prompts)

    def rest(self) -> None:
        """Without sessions, write what was recorded."""
        if self._timeline.steps and self._is_idle():
            self._write()

    def execute(self, execute: Callable[[Any], Any], work: Any) -> Any:
        """Execute a step, in the model's thread."""
        step = self._step
        step.began = time.perf_counter()
        result = execute(work)
        step.ended = time.perf_counter()
        step.gpu = self._clock.take() or step.ended - step.began
        return result

    def finish(self, finish_step: Callable[[Any, Any], None], work: Any, result: Any) -> None:
        finish_step(work, result)
        self._step.finished = time.perf_counter()
        self._timeline.steps.append(self._step)

    def arrived(self, session: str, epoch: int, round_: int) -> None:
        """Note that a round's message is here."""
        self._timeline.arrivals.append(((session, epoch, round_), time.perf_counter()))

    def _write(self) -> None:
        written, self._timeline = self._timeline, Timeline()
        with Path(self._file).open("a") as out:
            out.write(json.dumps(asdict(written)) + "\n")


class RecorderOfBoth:
    """The recorder of a step loop that runs two kinds of steps. which: the recorder of some work."""

    def __init__(self, recorders: Sequence[Recorder], which: Callable[[Any], Recorder]) -> None:
        self._recorders, self._which = recorders, which

    def plan(self, plan_step: Callable[[], Any]) -> Any:
        """Plan a step, of either kind; without one and without sessions, write what was recorded."""
        planned = time.perf_counter()
        work = plan_step()
        if work is not None:
            self._which(work).begin(planned, work)
            return work
        for recorder in self._recorders:
            recorder.rest()
        return None

    def execute(self, execute: Callable[[Any], Any], work: Any) -> Any:
        """Execute a step, in the model's thread."""
        return self._which(work).execute(execute, work)

    def finish(self, finish_step: Callable[[Any, Any], None], work: Any, result: Any) -> None:
        self._which(work).finish(finish_step, work, result)


class GraphClock:
    """How long CUDA graphs ran. It times every replay in the process, of which all are of one thread at a time."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if not torch.cuda.is_available():
            return
        replay = torch.cuda.CUDAGraph.replay

        def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay(graph)
            end.record()
            self._events.append((begin, end))

        patch.object(torch.cuda.CUDAGraph, "replay", timed_replay).start()

    def take(self) -> float:
        """Return the seconds of the graphs that have ended since the last call; 0 if none has.

        A service waits for its step, or leaves the last graph running and waits for those before.
        """
        ended = [pair for pair in self._events if pair[1].query()]
        self._events = self._events[len(ended) :]
        return sum(begin.elapsed_time(end) for begin, end in ended) / 1e3


@lru_cache
def graph_clock() -> GraphClock:
    """Return the clock of this process."""
    return GraphClock()


def timeline_of_draft(file: Path) -> Path:
    """Return where a target writes the timeline of the draft in it. file: of its own."""
    return file.with_name(f"{file.stem}-draft{file.suffix}")


def read_timeline(file: Path) -> Timeline:
    """Return all that a service has written so far. The last line may be in the making; it is left out then."""
    timeline = Timeline()
    for line in file.read_text().split("\n")[:-1] if file.exists() else []:
        content = json.loads(line)
        for step in content["steps"]:
            step["rounds"] = [(name, epoch, round_) for name, epoch, round_ in step["rounds"]]
            timeline.steps.append(StepTimes(**step))
        timeline.arrivals += [((name, epoch, round_), at) for (name, epoch, round_), at in content["arrivals"]]
    return timeline
