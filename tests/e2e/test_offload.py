"""KV offload in real services: the same tokens from a GPU's worth of pages and from a few, and a host that is full."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from models import PLAN, TARGET
from tests.client import APPROXIMATE, EXACT, Result, generate, make_request, metric, service_state, wait_for
from tests.client import wait_until_idle
from tests.stack import ROOT, Services, Stack, start_gateway, start_services

pytestmark = pytest.mark.books
FLAGS = ("--max-sessions", "8", "--max-context", "4096", "--prefill-chunk", "128")
PAGES = 100  # of all prompts and what follows them: more than any hot size


def event(stack: Stack, name: str) -> float:
    return metric(stack.http, "service_events", service="target", name=name)


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(book[5000:25_000])[: 100 + 450 * i] for i, book in enumerate(books[:3])]


def answers(stack: Stack, prompts: list[list[int]], at_once: int) -> dict[int, list[Result]]:
    """Of each prompt, exact and approximate."""
    stub = stack.stub()

    def run(case: tuple[int, list[int]]) -> Result:
        exactness, prompt = case
        return generate(stub, prompt, max_tokens=40, exactness=exactness, ignore_eos=True)

    cases = [(exactness, prompt) for exactness in (EXACT, APPROXIMATE) for prompt in prompts]
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(run, cases))
    return {EXACT: results[: len(prompts)], APPROXIMATE: results[len(prompts) :]}


@pytest.fixture(scope="module")
def wanted(launch: Callable[..., Stack], prompts: list[list[int]]) -> dict[int, list[Result]]:
    stack = launch(*FLAGS)
    results = answers(stack, prompts, 1)
    stack.stop()
    return results


def offloaded(launch: Callable[..., Stack], frames: int, memory: float = 0.5, *flags: str) -> Stack:
    tiers = ("--target-kv-tokens", str(16 * frames), "--host-kv-memory", str(memory))
    return launch(*FLAGS, *tiers, *flags)


@pytest.mark.parametrize(("frames", "at_once"), [(120, 1), (50, 1), (50, 6)])
def test_the_answers_do_not_change(
    launch: Callable[..., Stack],
    prompts: list[list[int]],
    wanted: dict[int, list[Result]],
    frames: int,
    at_once: int,
) -> None:
    stack = offloaded(launch, frames)
    got = answers(stack, prompts, at_once)
    for exactness, results in wanted.items():
        assert [r.tokens for r in got[exactness]] == [r.tokens for r in results]
    wait_until_idle(stack.http)
    print(
        frames,
        at_once,
        {
            n: event(stack, n)
            for n in ("kv_fetched_pages", "kv_refused_pages", "kv_copied_home", "kv_stages", "kv_spills")
        },
    )
    stack.stop()
