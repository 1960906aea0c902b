"""An event loop on virtual time: it runs what is due, and where nothing is, the clock jumps to what comes next.

Nothing but the order of calls and the seeded choices of its users decides what happens when, so that a run repeats.
"""

import asyncio
import sys
import zlib
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heappop, heappush
from random import Random
from typing import Any

from tests.simulation.process import Exited, Process, process_of


class Handle:
    """Something that is to be called; asyncio.Handle as far as asyncio needs it. number: of those made before it."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "number", "time")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, time: float, number: int
    ) -> None:
        self.callback, self.args, self.context, self.time, self.number = callback, args, context, time, number
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.time


class Task(asyncio.Task):
    """A task whose place in a set follows from its number, not from its address."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class Log:
    """What has happened, as a checksum of all of it and, where `keep` is set, as lines."""

    def __init__(self, keep: bool = False) -> None:
        self.checksum, self.length = 0, 0
        self.lines: list[str] | None = [] if keep else None

    def note(self, line: str) -> None:
        self.checksum, self.length = zlib.crc32(line.encode(), self.checksum), self.length + 1
        if self.lines is not None:
            self.lines.append(line)


class VirtualLoop(asyncio.AbstractEventLoop):
    """events: how many callbacks have run. errors: what nobody has caught, in a process that is alive.

    Callbacks run in the order of their times, those of the same time in the order in which they were asked for. What is
    due at once waits apart from what is due later, since most callbacks are.
    strokes: what is to happen between two callbacks, with the number of the one before which it does.
    thread_seconds: asked how long a call in a thread takes, which is told whether it is a model's step; None: for ever.
    It runs at once or at its end.
    """

    def __init__(self, seed: int, log: Log) -> None:
        self.random, self.log = Random(seed), log
        self.events = 0
        self.errors: list[str] = []
        self.strokes: list[tuple[int, Callable[[], None]]] = []
        self.thread_seconds: Callable[[bool], float | None] = lambda is_step: 0.01
        self._now = 0.0
        self._ready: deque[Handle] = deque()  # all due now
        self._later: list[tuple[float, int, Handle]] = []  # a heap
        self._calls = self._tasks = 0
        self._nobody = Context()

    # Running.

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run until `main` ends, and return what it returns."""
        events._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=lambda agen: None, finalizer=self._close_generator)
        try:
            task = self.create_task(main)
            while not task.done():
                self._run_next()
            return task.result()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(None)

    def _run_next(self) -> None:
        if self.strokes and self.strokes[0][0] <= self.events:
            heappop(self.strokes)[1]()
        handle = self._take_next()
        if handle.is_cancelled:
            return
        context = handle.context
        process = process_of(context)
        if process is not None and process.stopped:
            process.backlog.append(handle)
            return
        self.events += 1
        try:
            context.run(handle.callback, *handle.args)
        except Exited:
            pass
        except Exception as error:
            self.call_exception_handler({"message": "a callback failed", "exception": error})

    def _take_next(self) -> Handle:
        """Take what is due next, and let it be its time."""
        ready, later = self._ready, self._later
        if ready and not (later and later[0][0] <= self._now and later[0][1] < ready[0].number):
            return ready.popleft()
        self._now, _, handle = heappop(later)
        return handle

    def at_event(self, number: int, act: Callable[[], None]) -> None:
        """Call `act` between two callbacks: before the one of this number."""
        heappush(self.strokes, (number, act))

    def resume(self, process: Process) -> None:
        """Continue a process that was stopped, with all that it has missed."""
        process.stopped = False
        backlog, process.backlog = process.backlog, []
        for handle in backlog:
            heappush(self._later, (self._now, handle.number, handle))

    def _close_generator(self, generator: Any) -> None:
        self.call_soon(self.create_task, generator.aclose())

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._now

    get_debug = staticmethod(bool)  # False; each future asks

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        self._calls += 1
        handle = Handle(callback, args, copy_context() if context is None else context, self._now, self._calls)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        self._calls += 1
        handle = Handle(callback, args, copy_context() if context is None else context, when, self._calls)
        if when <= self._now:
            self._ready.append(handle)
        else:
            heappush(self._later, (when, self._calls, handle))
        return handle

    def call_outside(self, when: float, callback: Callable[..., Any], *args: Any) -> Any:
        """Call at a time, in no process: what networks and kernels do."""
        return self.call_at(when, callback, *args, context=self._nobody)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        context = copy_context() if context is None else context
        self._tasks += 1
        task = Task(self._tasks, coro, loop=self, name=name or f"task {self._tasks}", context=context)
        process = process_of(context)
        if process is not None:
            process.own(task)
            if not process.alive:
                task.cancel()
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a function as if in a thread: for a time that the simulation gives, at the beginning of it or the end."""
        done, seconds = self.create_future(), self.thread_seconds(executor is not None)
        early = self.random.random() < 0.5

        def call() -> tuple[Any, BaseException | None]:
            try:
                return func(*args), None
            except Exception as error:
                return None, error

        outcome = call() if early else None

        def finish() -> None:
            if not done.cancelled():
                result, error = outcome or call()
                done.set_result(result) if error is None else done.set_exception(error)

        if seconds is not None:
            self.call_later(seconds, finish)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        process = process_of(copy_context())
        if process is None or process.alive:
            error = context.get("exception")
            self.errors.append(f"{context.get('message')}: {error!r}")
