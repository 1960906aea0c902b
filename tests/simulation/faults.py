"""Faults of a run, at moments that the seed chooses: between two callbacks, or at a virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.simulation.cluster import Cluster
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import BETWEEN_SERVICES, Line, Network
from tests.simulation.process import Process, current_process
from tests.simulation.scenario import Scenario


class InjectedError(Exception):
    """Raised by a model's step if the scenario wants it to fail."""


@dataclass(frozen=True)
class Fault:
    """A fault that has happened: its time, its kind, and the processes that it hit."""

    at: float
    kind: str
    names: tuple[str, ...]


class Faults:
    """Lets the faults of a scenario happen.

    clusters: set once there are processes. on_stop: called with a process that is stopped. on_drain: called with a
    target that begins or ends to drain. happened: the faults so far, in order. The private counters say, by process,
    how many of its next steps are slow, failing, hanging or without finite logits.
    """

    def __init__(self, scenario: Scenario, loop: VirtualLoop, network: Network) -> None:
        self._scenario, self._loop, self._network = scenario, loop, network
        self._random = Random(scenario.seed + 3)
        self.clusters: list[Cluster] = []
        self.on_stop: Callable[[Process], None] = lambda process: None
        self.on_drain: Callable[[Process, bool], None] = lambda process, draining: None
        self.happened: list[Fault] = []
        self._slow, self._failing, self._hanging, self._sick = (Counter[str]() for _ in range(4))
        self._quiet_at = 0.0

    # When.

    async def happen(self) -> None:
        """Let all faults of the scenario happen, and wait until they are over."""
        scenario, loop = self._scenario, self._loop
        seconds = scenario.seconds + 1
        for _ in range(scenario.fault_count if scenario.faults else 0):
            if self._random.random() < 0.5:
                loop.call_outside(loop.time() + self._random.random() * seconds, self._happen)
            else:
                number = loop.events + self._random.randrange(100 + 200 * scenario.sessions)
                loop.at_event(number, self._happen)
        await asyncio.sleep(seconds)
        loop.strokes.clear()
        for pending in (self._slow, self._failing, self._hanging, self._sick):
            pending.clear()
        await asyncio.sleep(max(0.0, self._quiet_at - loop.time()))

    def _happen(self) -> None:
        kind = self._random.choice(self._scenario.faults)
        verb, _, what = kind.partition(" ")
        acts: dict[str, Callable[[str], tuple[str, ...]]] = {
            "kill": self._kill,
            "terminate": self._terminate,
            "stop": self._stop,
            "cut": self._cut,
            "stall": self._stall,
            "lose": self._lose_ray,
            "drain": self._drain,
        }
        names = acts.get(verb, lambda _: self._trouble(kind))(what)
        if names:
            self.happened.append(Fault(self._loop.time(), kind, names))
            self._loop.log.note(f"{self._loop.time():.6f} {kind}: {' '.join(names)}")

    def _last(self, seconds: float) -> None:
        self._quiet_at = max(self._quiet_at, self._loop.time() + seconds)

    # What.

    def _pick(self, side: str) -> Process | None:
        """Return a random living process of a side."""
        processes = [process for cluster in self.clusters for process in cluster.processes.values()]
        living = [process for process in processes if process.alive and process.name.startswith(side)]
        return self._random.choice(living) if living else None

    def _kill(self, side: str) -> tuple[str, ...]:
        process = self._pick(side)
        if process is None:
            return ()
        process.end()
        return (process.name,)

    def _terminate(self, side: str) -> tuple[str, ...]:
        process = self._pick(side)
        if process is None or not process.terminate():
            return ()
        return (process.name,)

    def _stop(self, side: str) -> tuple[str, ...]:
        process, seconds = self._pick(side), self._random.choice((0.5, 3.0, 12.0, 40.0, 40.0))
        if process is None or process.stopped:
            return ()
        process.stop()

        def resume() -> None:
            if process.alive:
                self._loop.resume(process)

        self._loop.call_outside(self._loop.time() + seconds, resume)
        self._last(seconds)
        self.on_stop(process)
        return (process.name,)

    def _drain(self, side: str) -> tuple[str, ...]:
        process, seconds = self._pick(side), self._random.choice((0.5, 3.0, 12.0))
        if process is None:
            return ()
        self.on_drain(process, True)
        self._loop.call_outside(self._loop.time() + seconds, self.on_drain, process, False)
        self._last(seconds)
        return (process.name,)

    def _line(self, of_service: bool = False) -> Line | None:
        lines = [line for line in self._network.lines.values() if line.server is not None]
        lines = [line for line in lines if line.method in BETWEEN_SERVICES] if of_service else lines
        return self._random.choice(lines) if lines else None

    def _cut(self, what: str) -> tuple[str, ...]:
        chosen, lost = self._line("service" in what), self._random.random() < 0.5
        if chosen is None:
            return ()
        lines = [line for line in self._network.lines.values() if line.ends == chosen.ends]
        for line in lines if what == "link" else [chosen]:
            line.cut(lost)
        return chosen.ends

    def _stall(self, _: str) -> tuple[str, ...]:
        chosen, seconds = self._line(), self._random.choice((0.3, 2.0, 12.0))
        if chosen is None:
            return ()
        self._network.stall(chosen.ends, seconds)
        self._last(seconds)
        return chosen.ends

    def _lose_ray(self, _: str) -> tuple[str, ...]:
        cluster = self._random.choice(self.clusters[1:])
        if not cluster.is_up:
            return ()
        cluster.lose()
        return tuple(cluster.processes)

    # Steps of models.

    def _trouble(self, kind: str) -> tuple[str, ...]:
        side = next((side for side in ("target", "draft") if side in kind), self._random.choice(("target", "draft")))
        process, steps = self._pick(side), self._random.randint(1, 4)
        if process is None:
            return ()
        name = process.name
        if kind == "hanging step":
            self._hanging[name] += 1
        elif kind == "slow steps":
            self._slow[name] += steps
        elif kind == "no numbers":
            self._sick[name] += steps
        else:
            self._failing[name] += steps
        return (name,)

    def thread_seconds(self, is_step: bool) -> float | None:
        """Return how many seconds a call in a thread of the present process takes; None: it never ends."""
        process, random = current_process(), self._loop.random
        name = "" if process is None else process.name
        if is_step and _take_one(self._hanging, name):
            return None
        if is_step and _take_one(self._slow, name):
            return random.choice((0.3, 1.5, 4.0))
        return 0.002 + (self._scenario.step_seconds if is_step else 0.02) * random.random()

    def before_step(self, name: str) -> None:
        """Raise InjectedError if the step of a process shall fail."""
        if _take_one(self._failing, name):
            raise InjectedError(f"a step of {name} fails")

    def is_sick(self, name: str) -> bool:
        """Return whether the next output of a process has no finite logits."""
        return _take_one(self._sick, name)

    # What the oracle asks.

    def concerning(self, names: set[str], since: float, until: float, kinds: str = "") -> list[Fault]:
        """Return the faults of a period that hit any of these processes. kinds: a word that the kind must contain."""
        in_time = [fault for fault in self.happened if since <= fault.at <= until]
        return [fault for fault in in_time if names & set(fault.names) and kinds in fault.kind]

    def count(self, names: set[str], since: float, until: float, kinds: str = "") -> int:
        """Count the faults of a period that hit any of these processes. kinds: a word that the kind must contain."""
        return len(self.concerning(names, since, until, kinds))


def _take_one(left: Counter[str], name: str) -> bool:
    takes = left[name] > 0
    left[name] -= takes
    return takes
