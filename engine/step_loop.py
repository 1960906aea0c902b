"""The loop of both services: between steps the event loop owns all state; during a step a thread runs the model."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Work = TypeVar("Work")
Result = TypeVar("Result")


async def run_step_loop(
    plan_step: Callable[[], Work | None],
    execute: Callable[[Work], Result],
    finish_step: Callable[[Work, Result], None],
    wake: asyncio.Event,
    next_deadline: Callable[[], float | None],
) -> None:
    """Plan, execute in a thread, finish; sleep while there is nothing to plan.

    `wake` is set by whoever brings new work; `next_deadline`: seconds until planning may find work by itself.
    An exception of any of them ends the loop: the state is no longer known to be right.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="model") as pool:
        while True:
            wake.clear()
            work = plan_step()
            if work is not None:
                finish_step(work, await loop.run_in_executor(pool, execute, work))
                continue
            try:
                async with asyncio.timeout(next_deadline()):
                    await wake.wait()
            except TimeoutError:
                pass


def share_prefill(remaining: list[int], budget: int) -> list[int]:
    """How many prompt tokens each sequence may run in this step; `remaining` in order of arrival.

    Half of the budget goes to the shortest prompts first, so that they never queue behind a long one; the
    rest to the oldest, so that a long one never starves.
    """
    shares = [0] * len(remaining)

    def give(order: list[int], amount: int) -> int:
        for i in order:
            share = min(remaining[i] - shares[i], amount)
            shares[i] += share
            amount -= share
        return amount

    shortest = sorted(range(len(remaining)), key=remaining.__getitem__)
    left = give(shortest, budget - budget // 2)
    give(list(range(len(remaining))), left + budget // 2)
    return shares
