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
    """One step of a service; times in seconds by time.perf_counter."""

    planned: float
    """When its planning began."""
    began: float = 0.0
    """When the model's thread began with it."""
    ended: float = 0.0
    """When the model's thread had ended it."""
    finished: float = 0.0
    """When its results were taken."""
    gpu: float = 0.0
    """Seconds that graphs ran which have ended by now; without a GPU, or with prompts, all that the thread took."""
    rounds: list[RoundKey] = field(default_factory=list)
    """Rounds that it drafted or verified."""
    prompts: int = 0
    """Sessions whose prompt it read a part of."""

    @property
    def gpu_share(self) -> float:
        """Share of the thread's time in which the model ran."""
        return min(1.0, self.gpu / (self.ended - self.began)) if self.ended > self.began else 1.0


@dataclass
class Timeline:
    """The steps of a service, and when the proposals or verdicts of its rounds came."""

    steps: list[StepTimes] = field(default_factory=list)
    arrivals: list[tuple[RoundKey, float]] = field(default_factory=list)


class Recorder:
    """Records the steps of one model.

    take_rounds: returns the rounds of a planned step, and how many prompts it reads.
    """

    def __init__(self, file: str, take_rounds: Callable[[Any], tuple[list[RoundKey], int]]) -> None:
        self._file, self._take_rounds = file, take_rounds
        self.is_idle: Callable[[], bool] = lambda: True  # whether there is no session; the file is written then
        self._timeline = Timeline()
        self._clock = graph_clock()
        self._step = StepTimes(0.0)

    def begin(self, planned: float, step: Any) -> None:
        """Begin with a step whose planning began at that time."""
        rounds, prompts = self._take_rounds(step)
        self._step = StepTimes(planned, rounds=rounds, prompts=prompts)

    def execute(self, execute: Callable[[Any], Any], step: Any) -> Any:
        """Execute a step, in the model's thread."""
        times = self._step
        times.began = time.perf_counter()
        result = execute(step)
        times.ended = time.perf_counter()
        replayed, graphs = self._clock.take()
        # A prompt's attention is launched beside graphs; a step that only launches has ended none.
        times.gpu = graphs if replayed and not times.prompts else times.ended - times.began
        return result

    def end(self) -> None:
        """Take the step that was finished just now."""
        self._step.finished = time.perf_counter()
        self._timeline.steps.append(self._step)

    def arrived(self, session: str, epoch: int, round_: int) -> None:
        """Note that a round's message is here."""
        self._timeline.arrivals.append(((session, epoch, round_), time.perf_counter()))

    def write_if_idle(self) -> None:
        """Append what was recorded to the file, if there is no session."""
        if not self._timeline.steps or not self.is_idle():
            return
        written, self._timeline = self._timeline, Timeline()
        with Path(self._file).open("a") as out:
            out.write(json.dumps(asdict(written)) + "\n")


class TimedSteps:
    """Steps that are recorded as they run. recorder_of: returns the recorder of a step."""

    def __init__(self, steps: Any, recorders: Sequence[Recorder], recorder_of: Callable[[Any], Recorder]) -> None:
        self._steps, self._recorders, self._recorder_of = steps, recorders, recorder_of
        self.fail_step, self.next_deadline = steps.fail_step, steps.next_deadline

    def plan_step(self) -> Any:
        planned = time.perf_counter()
        step = self._steps.plan_step()
        if step is not None:
            self._recorder_of(step).begin(planned, step)
            return step
        for recorder in self._recorders:
            recorder.write_if_idle()
        return None

    def execute(self, step: Any) -> Any:
        return self._recorder_of(step).execute(self._steps.execute, step)

    def finish_step(self, step: Any, result: Any) -> None:
        self._steps.finish_step(step, result)
        self._recorder_of(step).end()


class GraphClock:
    """How long CUDA graphs ran. It wraps torch's replay in this process, where one thread at a time replays.

    A graph that is launched while nothing runs counts from its launch on, some tenths of a millisecond too long.
    """

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._replayed = False  # since the last call of `take`
        if not torch.cuda.is_available():
            return
        replay = torch.cuda.CUDAGraph.replay

        def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay(graph)
            end.record()
            self._events.append((begin, end))
            self._replayed = True

        patch.object(torch.cuda.CUDAGraph, "replay", timed_replay).start()

    def take(self) -> tuple[bool, float]:
        """Return whether graphs were replayed or have ended since the last call, and the seconds of those that have.

        A service waits for its step, or leaves the last graph running and waits for those before.
        """
        ended = [pair for pair in self._events if pair[1].query()]
        self._events = self._events[len(ended) :]
        replayed, self._replayed = self._replayed or bool(ended), False
        return replayed, sum(begin.elapsed_time(end) for begin, end in ended) / 1e3


@lru_cache
def graph_clock() -> GraphClock:
    """Return the clock of this process."""
    return GraphClock()


def timeline_of_draft(file: Path) -> Path:
    """Return the file for the draft that runs in a target. file: the target's own."""
    return file.with_name(f"{file.stem}-draft{file.suffix}")


def read_timeline(file: Path) -> Timeline:
    """Return what a service has written so far, without a last line that is not complete."""
    timeline = Timeline()
    for line in file.read_text().split("\n")[:-1] if file.exists() else []:
        content = json.loads(line)
        for step in content["steps"]:
            step["rounds"] = [(name, epoch, round_) for name, epoch, round_ in step["rounds"]]
            timeline.steps.append(StepTimes(**step))
        timeline.arrivals += [((name, epoch, round_), at) for (name, epoch, round_), at in content["arrivals"]]
    return timeline
