"""Simulated processes: groups of tasks that are killed, stopped (SIGSTOP) and continued together."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

_PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)


class Exited(BaseException):
    """Raised where a process ends itself, so that its code runs no further."""


class Process:
    """All tasks and callbacks that a process has started, recognised by the context that they inherit.

    backlog: callbacks that were due while the process was stopped. at_end: called once when the process ends, with the
    exception of its main task, or None if it was killed or returned.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.stopped = True, False
        self.backlog: list[Any] = []
        self.at_end: list[Callable[[BaseException | None], None]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._main: asyncio.Task[Any] | None = None
        self.context: Context = copy_context()
        self.context.run(_PROCESS.set, self)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the main task; the process ends with it."""
        loop = asyncio.get_running_loop()
        task = self._main = loop.create_task(main(), name=self.name, context=self.context.copy())
        task.add_done_callback(self._main_ended, context=Context())

    def _main_ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        self.end(error)

    def own(self, task: asyncio.Task[Any]) -> None:
        """Register a task that this process has started."""
        self._tasks.append(task)
        if len(self._tasks) > 256:
            self._tasks = self.running

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not ended."""
        return [task for task in self._tasks if not task.done()]

    def end(self, error: BaseException | None = None) -> None:
        """End the process, as SIGKILL does: the network closes its lines, and nothing that it still does has an effect.

        Its tasks are cancelled only so that Python frees them.
        """
        if not self.alive:
            return
        self.alive, self.stopped = False, False
        for tell in self.at_end:
            tell(error)
        for task in self.running:
            task.cancel()

    def terminate(self) -> bool:
        """Ask the process to end itself, as SIGTERM does. Return whether it has begun and could be asked."""
        return self.alive and self._main is not None and self._main.cancel()

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.stopped = True


def current_process() -> Process | None:
    """Return the process whose code is running, None if it is the simulator's."""
    return _PROCESS.get()


def process_of(context: Context) -> Process | None:
    """Return the process that a callback with this context belongs to."""
    return context.get(_PROCESS)
