"""An event loop on virtual time: it runs the callbacks that are due, and otherwise the clock jumps to the next one.

Only the order of calls and the seeded choices of its users decide what happens when, so a run can be repeated.
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
    """A pending callback, with the part of asyncio.Handle that asyncio uses. number: its place in the order of
    calls."""

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
    """A task that hashes by its number, so that the order of sets does not depend on addresses."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class Log:
    """The events of a run, as a checksum and, if `keep` is set, as lines."""

    def __init__(self, keep: bool = False) -> None:
        self.checksum, self.length = 0, 0
        self.lines: list[str] | None = [] if keep else None

    def note(self, line: str) -> None:
        self.checksum, self.length = zlib.crc32(line.encode(), self.checksum), self.length + 1
        if self.lines is not None:
            self.lines.append(line)


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order of their times, and those of one time in the order in which they were requested.

    events: number of callbacks that have run. errors: exceptions that nobody caught in a living process. strokes: a
    heap of (number, act): `act` happens before the callback of that number. thread_seconds: returns how long a call in
    a thread takes, None if it never ends; its argument says whether the call is a model's step. Such a call runs at the
    beginning or at the end of that time. Callbacks that are due at once wait in a queue of their own, since most are.
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
        """Run until `main` ends, and return its result."""
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
        """Take the callback that is due next, and set the clock to its time."""
        ready, later = self._ready, self._later
        if ready and not (later and later[0][0] <= self._now and later[0][1] < ready[0].number):
            return ready.popleft()
        self._now, _, handle = heappop(later)
        return handle

    def at_event(self, number: int, act: Callable[[], None]) -> None:
        """Call `act` before the callback of this number."""
        heappush(self.strokes, (number, act))

    def resume(self, process: Process) -> None:
        """Continue a stopped process with all the callbacks that it missed."""
        process.stopped = False
        backlog, process.backlog = process.backlog, []
        for handle in backlog:
            heappush(self._later, (self._now, handle.number, handle))

    def _close_generator(self, generator: Any) -> None:
        self.call_soon(self.create_task, generator.aclose())

    # The interface of asyncio loops.

    def time(self) -> float:
        return self._now

    get_debug = staticmethod(bool)  # returns False; every future asks

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
        """Call at a time and in no process, as networks and kernels do."""
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
        """Run a function as if in a thread, at the beginning or the end of a time that the simulation gives."""
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
