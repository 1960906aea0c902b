"""Targets that the load asks for are placed and found; surplus ones are drained first, and ended without sessions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from orchestrator.cluster.autoscaling import Autoscaler, TargetLoad, direction_of
from orchestrator.cluster.directory import Directory, side_of
from orchestrator.sessions.routing import TargetView
from specahead.config.launch import Autoscaling
from specahead.wire.messages import Report
from tests.unit.until import until

SLOW = Autoscaling(max_targets=8, kv_use=0.7, wait=5, out_delay=30, in_delay=600)


@pytest.mark.parametrize(
    ("loads", "direction"),
    [
        ([TargetLoad(0.0, 0.0)] * 3, -1),
        ([TargetLoad(0.5, 0.0)] * 3, 0),  # two would have 0.75 in use
        ([TargetLoad(0.4, 0.0)] * 3, -1),
        ([TargetLoad(0.9, 0.0)] * 3, 1),
        ([TargetLoad(0.1, 3.0)] * 3, 0),  # while sessions wait, no target goes
        ([TargetLoad(0.1, 6.0)] * 3, 1),
    ],
)
def test_the_load_asks_for_more_or_fewer(loads: list[TargetLoad], direction: int) -> None:
    assert direction_of(loads, len(loads), SLOW) == direction


@dataclass
class Stream:
    """A target that serves, as the router knows it. drained: what it was told."""

    view: TargetView
    connected: bool = True
    drained: list[bool] = field(default_factory=list)

    async def drain(self, draining: bool) -> None:
        self.drained.append(draining)
        self.say(draining=draining)

    def say(self, **values: Any) -> None:
        self.view.report = replace(self.view.report, **values)


class Fleet:
    """Places a target and a draft at a time. failing: services that cannot start. slow: those that take for ever."""

    def __init__(self) -> None:
        self.names = ["target-1", "draft-1"]
        self.slow: set[str] = set()
        self.failing: set[str] = set()
        self.replaced: list[str] = []
        self.streams = {"target-1": self.stream("target-1")}

    def stream(self, name: str) -> Stream:
        return Stream(TargetView(name, Report(number=1, kv_pages=100, free_kv_pages=100)))

    @property
    def latest(self) -> list[str]:
        return self.names[-2:]

    def add_target(self) -> None:
        number = len(self.names) // 2 + 1
        self.names += [f"target-{number}", f"draft-{number}"]

    def remove_target(self) -> None:
        del self.names[-2:]

    def locate(self, name: str) -> str:
        if name in self.failing:
            raise RuntimeError("no such model")
        if name in self.slow:
            return ""
        if side_of(name) == "target":
            self.streams.setdefault(name, self.stream(name))
        return f"{name}:7"

    def replace(self, name: str) -> None:
        self.replaced.append(name)
        self.failing.discard(name)


class Run:
    """An autoscaler at work: one to three targets, whose KV is to be half in use."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.directories = {side: Directory({f"{side}-1": f"{side}-1:7"}) for side in ("target", "draft")}
        settings, lines = Autoscaling(max_targets=3, kv_use=0.5, out_delay=0, in_delay=0), self.fleet.streams
        fleet: Any = self.fleet
        turn = asyncio.Lock()
        self.autoscaler = Autoscaler(settings, 1, lines, lines, self.directories, fleet, turn)

    @property
    def found(self) -> list[str]:
        return [name for directory in self.directories.values() for name in directory.addresses]

    def load(self, use: int, sessions: int = 1) -> None:
        for stream in self.fleet.streams.values():
            stream.say(free_kv_pages=100 - use, sessions=sessions)


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr("orchestrator.cluster.autoscaling.BEAT_SECONDS", 0.01)
    run = Run()
    task = asyncio.create_task(run.autoscaler.run())
    yield run
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def draining_target(run: Run) -> Stream:
    """Have the load ask for a second target, and then for one alone; return the second one, which drains."""
    run.load(80)
    await until(lambda: "target-2" in run.found)
    run.load(10)
    added = run.fleet.streams["target-2"]
    await until(lambda: added.drained == [True])
    return added


async def test_what_the_load_asks_for_is_placed_with_its_drafts_and_found(run: Run) -> None:
    run.load(80)
    await until(lambda: run.found == ["target-1", "target-2", "draft-1", "draft-2"])
    assert run.fleet.names == ["target-1", "draft-1", "target-2", "draft-2"]
    assert not any(stream.drained for stream in run.fleet.streams.values())


async def test_a_target_that_is_too_many_is_ended_when_its_sessions_are(run: Run) -> None:
    added = await draining_target(run)
    await asyncio.sleep(0.2)
    assert "target-2" in run.fleet.names, "a session runs on it"
    added.say(sessions=0)
    await until(lambda: run.fleet.names == ["target-1", "draft-1"])
    assert run.found == ["target-1", "draft-1"]


async def test_a_target_is_ended_when_it_has_been_quiet_for_three_beats_in_a_row() -> None:
    """Each for itself: until then gateways may not know that it drains, and open a session on it."""
    run = Run()
    run.autoscaler._staying = 1
    step, names = run.autoscaler._step, lambda: [name for name in run.fleet.names if side_of(name) == "target"]
    for use in (80, 80, 10):
        run.load(use)
        await step()
    last = run.fleet.streams["target-3"]
    assert names() == ["target-1", "target-2", "target-3"] and last.drained == [True]
    for sessions in (0, 0, 1, 0, 0):
        run.load(10, sessions=0)
        last.say(sessions=sessions)
        await step()
        assert len(names()) == 3, "not quiet for long enough"
    for expected in (2, 2, 2, 1):
        await step()
        assert len(names()) == expected


async def test_a_target_that_drains_stays_if_the_load_comes_back(run: Run) -> None:
    added = await draining_target(run)
    run.load(90)
    await until(lambda: added.drained == [True, False])
    assert run.fleet.names[:4] == ["target-1", "draft-1", "target-2", "draft-2"]


async def test_a_target_that_is_lost_while_it_drains_is_ended(run: Run) -> None:
    (await draining_target(run)).connected = False
    await until(lambda: run.fleet.names == ["target-1", "draft-1"])
