"""A stand-in for Ray: it starts the services of a launch, and starts them again when they die, while it lives."""

import asyncio
from collections.abc import Callable, Coroutine

from tests.simulation.loop import VirtualLoop
from tests.simulation.network import Network
from tests.simulation.process import Process

Main = Callable[[], Coroutine[object, object, None]]


class Cluster:
    """Owns processes by name. It stands in for RayPlacement where services are supervised.

    processes: the last process of each name. is_up: whether dead processes are started again. report: called for a
    process that ended with an error. is_lost: asked whether the frames that a dying process has sent are lost.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        report: Callable[[str, BaseException], None],
        is_lost: Callable[[], bool],
    ) -> None:
        self._loop, self._network, self._report, self._is_lost = loop, network, report, is_lost
        self._mains: dict[str, Main] = {}
        self.processes: dict[str, Process] = {}
        self.is_up = True

    def place(self, name: str, main: Main) -> None:
        """Start a process, and start it again whenever it dies."""
        self._mains[name] = main
        self._start(name)

    def _start(self, name: str) -> None:
        present = self.processes.get(name)
        if not self.is_up or (present is not None and present.alive):
            return
        process = self.processes[name] = Process(name)
        process.at_end.append(lambda error: self._ended(process, error))
        self._loop.log.note(f"{self._loop.time():.6f} {name} starts")
        self._loop.call_outside(self._loop.time(), process.run, self._mains[name])

    def _ended(self, process: Process, error: BaseException | None) -> None:
        self._loop.log.note(f"{self._loop.time():.6f} {process.name} ends: {error!r}")
        self._loop.resume(process)
        self._network.drop(process, self._is_lost)
        if error is not None:
            self._report(process.name, error)
        delay = 0.1 + 2 * self._loop.random.random()
        self._loop.call_outside(self._loop.time() + delay, self._start, process.name)

    def lose(self) -> None:
        """Let Ray die: the services end within a second, and nobody starts them again."""
        self.is_up = False
        for process in self.processes.values():
            self._loop.call_outside(self._loop.time() + self._loop.random.random(), process.end)

    # The interface that supervision uses, from a thread.

    owns_ray = True

    def locate(self, name: str) -> str:
        return ""  # services never move

    def replace(self, name: str) -> None:
        self.processes[name].end()

    def is_alive(self) -> bool:
        return self.is_up

    def restart(self) -> None:
        for process in self.processes.values():
            process.end()
        self.is_up = True
        for name in self._mains:
            self._start(name)


async def wait_for(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, and return whether it did in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not holds():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
