"""The loop of both services: between steps the event loop owns all state; during a step a thread runs the model."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from specahead.engine.steps.runner import Runner
from specahead.kernels.prompt_reads import UNIT

log = logging.getLogger(__name__)

HUNG = 70  # the exit status of a process whose model hangs
OLDEST_EVERY = 4  # steps that read prompts, of which the oldest prompt comes first in one
MOST_FAILURES = 3  # steps that may fail one after another before a service gives up

Result = TypeVar("Result")


class Steps(Protocol):
    """What the loop drives: it plans, executes and finishes steps. A step and its result are opaque to the loop."""

    def plan_step(self) -> Any:
        """Return the next step; None: there is nothing to do."""

    def execute(self, step: Any) -> Any:
        """Run the model, in the model's thread, and return the step's result."""

    def finish_step(self, step: Any, result: Any) -> None:
        """Take the result of a step."""

    def fail_step(self, step: Any, error: Exception) -> bool:
        """Take the sessions of a step that raised an error out of service, and return True; False: that cannot be."""

    def next_deadline(self) -> float | None:
        """Return the seconds until planning may find work by itself; None: it will not."""


async def run_step_loop(
    steps: Steps,
    wake: asyncio.Event,
    step_timeout: float,
    sends_first: bool = True,
    survives_failures: bool = True,
    warm_up_more: Callable[[], Callable[[], None] | None] = lambda: None,
) -> None:
    """Plan a step, execute it in a thread, finish it; sleep while there is nothing to plan. Runs until cancelled.

    wake: set by whoever brings new work.
    step_timeout: seconds after which a step counts as hung. Threads cannot be ended: the process is, with status HUNG.
    sends_first: whether what a step gave is sent before the next step is planned. Otherwise it is sent while that step
        runs: the model waits less for the host, and the other end waits some tenths of a millisecond longer.
    survives_failures: whether `fail_step` is asked after `execute` raised. If not, or if it returns False, the loop
        raises that error.
    warm_up_more: called while there is nothing to plan; returns what the thread is to run so that a further kind of
        step is ready before it is planned, None for nothing.

    Raises what `plan_step`, `finish_step` or `warm_up_more` raises, since the state is no longer known to be right; an
    error after which the device cannot be used (`is_fatal`); RuntimeError if MOST_FAILURES steps in a row failed.
    """
    failures = 0
    with ThreadPoolExecutor(1, thread_name_prefix="model") as pool:
        while True:
            wake.clear()
            step = steps.plan_step()
            if step is None:
                if (warm_up := warm_up_more()) is not None:
                    await _in_thread(pool, step_timeout, warm_up)
                else:
                    await _wait(wake, steps.next_deadline())
                continue
            try:
                result = await _in_thread(pool, step_timeout, steps.execute, step)
            except Exception as error:
                if is_fatal(error) or not survives_failures or not steps.fail_step(step, error):
                    log.error("a model step failed, which ends the service: %s", describe(error))
                    raise
                failures += 1
                if failures == MOST_FAILURES:
                    reason = f"{failures} model steps failed in a row, the last with {describe(error)}"
                    raise RuntimeError(reason) from error
                continue
            failures = 0
            steps.finish_step(step, result)
            if sends_first:
                await asyncio.sleep(0)


async def _wait(wake: asyncio.Event, seconds: float | None) -> None:
    """Wait for new work, at most this long; None: without end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()


def preparation_of(runners: Sequence[Runner], on_end: Callable[[], None]) -> Callable[[], None] | None:
    """Return what makes one of the runners ready for one more kind of step; None if all are ready for all.

    on_end: called by it once that is so.
    """
    unprepared = [runner for runner in runners if runner.unprepared]
    if not unprepared:
        return None

    def prepare() -> None:
        unprepared[0].warm_up_more()
        if not any(runner.unprepared for runner in unprepared):
            on_end()

    return prepare


async def _in_thread(pool: Executor, most_seconds: float, function: Callable[..., Result], *given: object) -> Result:
    """Run a function in the model's thread. The process ends if that takes more than `most_seconds`."""
    loop = asyncio.get_running_loop()
    alarm = loop.call_later(most_seconds, _end_hung, most_seconds)
    try:
        return await loop.run_in_executor(pool, function, *given)
    finally:
        alarm.cancel()


def _end_hung(seconds: float) -> None:
    """End the process without waiting for its threads."""
    log.critical("a model step has taken more than %g s, so it hangs: the process ends", seconds)
    logging.shutdown()
    os._exit(HUNG)


def is_fatal(error: Exception) -> bool:
    """Return whether no later step can succeed in this process: the GPU is out of memory, or its context is lost."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "CUDA error" in str(error)


def describe(error: Exception) -> str:
    """Return an exception's type and text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def prefill_chunk(asked: int, device: torch.device) -> int:
    """Return how many prompt tokens a step may run: `asked`, or a number that suits the device if that is 0."""
    return asked or (8192 if device.type == "cuda" else 512)


def share_prefill(starts: list[int], remaining: list[int], budget: int, number: int) -> list[int]:
    """Return how many prompt tokens each sequence may run in this step, in order of arrival.

    The shortest prompts come first, so that they never queue behind a long one; in every OLDEST_EVERY-th step the
    oldest comes first, so that a long one never starves. Most steps read one prompt: each further one has the host
    launch as much attention again. starts: tokens of each that are read. number: of the step among those that read
    prompts. A part that does not end its prompt has UNIT tokens at least and ends at a multiple of UNIT, and tokens
    beyond it wait: a few tokens read the whole context before them, and a part that began between two multiples would
    be padded with half as many queries again (kernels/prompt_reads.py). Budgets below two of them are given whole.
    """
    order = sorted(range(len(remaining)), key=remaining.__getitem__)
    if order and oldest_first(number):
        order = [0, *(index for index in order if index)]
    shares, left = [0] * len(remaining), budget
    for index in order:
        shares[index] = min(remaining[index], left)
        left -= shares[index]
    if budget < 2 * UNIT:
        return shares
    ends = [(start + share) // UNIT * UNIT - start for start, share in zip(starts, shares, strict=True)]
    return [
        share if share == left else end if end >= min(UNIT, max(shares)) else 0
        for share, end, left in zip(shares, ends, remaining, strict=True)
    ]


def oldest_first(number: int) -> bool:
    """Return whether the oldest prompt comes first in a step, by its number among those that read prompts."""
    return number % OLDEST_EVERY == OLDEST_EVERY - 1
