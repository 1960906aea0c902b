"""The loop of both services, driven by functions: what becomes of a step that fails, and how prompts share a step."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specahead.engine.steps.step_loop import (
    HUNG,
    MOST_FAILURES,
    OLDEST_EVERY,
    oldest_first,
    run_step_loop,
    share_prefill,
)
from specahead.kernels.prompt_attention import UNIT

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Loop:
    """Steps are numbers; `errors` says which of them raise what. The loop is cancelled after the last step."""

    steps: int
    errors: dict[int, Exception]
    handles: bool = True
    planned: int = 0
    finished: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def plan_step(self) -> int | None:
        if self.planned == self.steps:
            return None
        self.planned += 1
        return self.planned - 1

    def execute(self, step: int) -> int:
        if step in self.errors:
            raise self.errors[step]
        return step

    def finish_step(self, step: int, result: int) -> None:
        self.finished.append(result)

    def fail_step(self, step: int, error: Exception) -> bool:
        assert error is self.errors[step]
        self.failed.append(step)
        return self.handles

    def next_deadline(self) -> None:
        pass

    def run(self) -> None:
        async def until_idle() -> None:
            loop = run_step_loop(self, asyncio.Event(), 60)
            async with asyncio.timeout(0.2):
                await loop

        try:
            asyncio.run(until_idle())
        except TimeoutError:
            assert self.planned == self.steps


@pytest.mark.parametrize("sends_first", [True, False])
async def test_what_a_step_gave_is_sent_before_the_next_one_is_planned_or_while_it_runs(sends_first: bool) -> None:
    told: list[str] = []

    def plan() -> int | None:
        told.append("planned")
        return 0 if len(told) < 4 else None

    def finish(work: int, result: int) -> None:
        asyncio.get_running_loop().call_soon(told.append, "sent")

    steps = SimpleNamespace(
        plan_step=plan, execute=lambda step: step, finish_step=finish, fail_step=None, next_deadline=lambda: None
    )
    loop = run_step_loop(steps, asyncio.Event(), 60, sends_first)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await loop
    assert told[:3] == (["planned", "sent", "planned"] if sends_first else ["planned", "planned", "sent"])


def test_a_failed_step_is_handed_over_and_the_next_ones_run() -> None:
    loop = Loop(5, {1: ValueError("no"), 3: RuntimeError("no")})
    loop.run()
    assert (loop.finished, loop.failed) == ([0, 2, 4], [1, 3])


def test_steps_that_fail_in_a_row_end_the_loop_with_the_last_error() -> None:
    loop = Loop(10, {i: ValueError(f"step\n{i}") for i in range(2, 10)})
    with pytest.raises(RuntimeError, match=f"{MOST_FAILURES} .* in a row, .*ValueError: step {1 + MOST_FAILURES}"):
        loop.run()
    assert loop.planned == 2 + MOST_FAILURES


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
)
def test_a_device_that_is_lost_ends_the_loop_at_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(3, {0: error})
    with pytest.raises(type(error)):
        loop.run()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"a model step failed, which ends the service: {type(error).__name__}")
    assert (loop.planned, loop.failed) == (1, [])


HANGING = """
import asyncio, time, types
from specahead.engine.steps.step_loop import run_step_loop
steps = types.SimpleNamespace(plan_step=lambda: 1, execute=lambda step: time.sleep(100))
asyncio.run(run_step_loop(steps, asyncio.Event(), step_timeout=0.2))
"""


def test_a_step_that_hangs_ends_the_process() -> None:
    """No thread can be ended, and nobody waits for this one."""
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode == HUNG
    assert "taken more than 0.2 s" in ended.stderr


@given(st.lists(st.integers(1, 400), max_size=8), st.integers(2, 300), st.integers(0, 9))
def test_prompts_share_a_step(remaining: list[int], budget: int, number: int) -> None:
    """The whole budget is used where there is work; the shortest prompt comes first, or the oldest."""
    shares = share_prefill([0] * len(remaining), remaining, budget, number)
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    assert sum(shares) == min(budget, sum(remaining))
    if remaining:
        first = 0 if oldest_first(number) else remaining.index(min(remaining))
        assert shares[first] == min(remaining[first], budget)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 9000)), min_size=1, max_size=6), st.integers(1024, 9000))
def test_large_parts_of_prompts_end_where_a_piece_does(prompts: list[tuple[int, int]], budget: int) -> None:
    """The oldest moves on in every fourth step, so that every prompt is read in the end."""
    starts, remaining = [start for start, _ in prompts], [left for _, left in prompts]
    shares = share_prefill(starts, remaining, budget, OLDEST_EVERY - 1)
    assert sum(shares) <= budget and shares[0] > 0
    for start, share, left in zip(starts, shares, remaining, strict=True):
        assert 0 <= share <= left
        assert share in (0, left) or (start + share) % UNIT == 0
