"""KV offload in real services: the same tokens whatever lies on the device, and a host whose memory is full."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from models import TARGET
from tests.client import APPROXIMATE, EXACT, generate, make_request, metric, service_state, wait_until_idle
from tests.stack import Stack

# A round that a slow machine decodes without the draft is read wholly, which changes what `approximate` answers.
PATIENCE = ("--draft-timeout", "60")
FLAGS = ("--max-sessions", "8", "--prefill-chunk", "128", "--max-context", "2048", *PATIENCE)
MOST = 2048  # tokens, of a context and at home
# GiB that hold them: keys and values, layers, heads, dimensions, float32.
MEMORY = MOST * 2 * 10 * 4 * 64 * 4 / 2**30


@pytest.fixture(scope="module")
def start(launch: Callable[..., Stack]) -> Iterator[Callable[..., Stack]]:
    """Launches that end with this module; a target without tiers where no more is said."""
    running: list[Stack] = []

    def one(*tiers: str) -> Stack:
        running.append(launch(*FLAGS, *tiers))
        return running[-1]

    yield one
    for stack in running:
        stack.stop()


@pytest.fixture(scope="module")
def plain(start: Callable[..., Stack]) -> Stack:
    return start()


@pytest.fixture(scope="module")
def small(start: Callable[..., Stack]) -> Stack:
    """KV of 2,048 tokens in all, of which 90 pages lie on the device."""
    return start("--target-kv-tokens", "1440", "--host-kv-memory", str(MEMORY))


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    """Of 100, 550 and 1000 tokens."""
    return [tokenizer.encode(book[5000:25_000])[: 100 + 450 * i] for i, book in enumerate(books[:3])]


def answers(stack: Stack, prompts: list[list[int]], at_once: int) -> list[list[int]]:
    """To each prompt, exact and approximate."""
    stub = stack.stub()

    def run(case: tuple[int, list[int]]) -> list[int]:
        exactness, prompt = case
        return generate(stub, prompt, max_tokens=24, exactness=exactness, ignore_eos=True).tokens

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, [(e, prompt) for e in (EXACT, APPROXIMATE) for prompt in prompts]))


@pytest.fixture(scope="module")
def wanted(plain: Stack, prompts: list[list[int]]) -> list[list[int]]:
    return answers(plain, prompts, 1)


def count(stack: Stack, name: str, service: str = "target") -> float:
    return metric(stack.http, "service_events_total", service=service, name=name)


def test_from_fifty_pages_the_answers_are_the_same(
    start: Callable[..., Stack], prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    """One after the other and all at once; what has become of the KV is in /metrics."""
    stack = start("--target-kv-tokens", "800", "--host-kv-memory", "0.5")
    assert answers(stack, prompts, 1) == wanted
    assert count(stack, "kv_stages") > 0
    assert count(stack, "kv_fetched_pages") > 0
    assert count(stack, "kv_stored_pages") > 50
    assert count(stack, "kv_offloads") >= 1
    assert service_state(stack.http, "target", "kv_gpu_pages") == 50
    assert service_state(stack.http, "target", "kv_offload_active") == 1
    assert answers(stack, prompts, 6) == wanted
    wait_until_idle(stack.http)
    stack.stop()


def test_from_ninety_pages_the_answers_are_the_same(
    small: Stack, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    assert answers(small, prompts, 1) == wanted
    assert service_state(small.http, "target", "kv_gpu_pages") == 90
    assert count(small, "kv_offloads") >= 1


def refusal(stack: Stack, prompt: list[int], **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(stack.stub().Generate(make_request(prompt, temperature=0, **fields)))
    error: Any = caught.value
    return error.code(), error.details()


def refusal_over_http(stack: Stack, prompt: list[int], max_tokens: int) -> tuple[int, str]:
    body = {"model": TARGET.name, "prompt": prompt, "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.http}/v1/completions", json.dumps(body).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    return caught.value.code, json.load(caught.value)["error"]["code"]


def test_a_full_host_has_the_younger_one_give_way(plain: Stack, small: Stack, books: list[str], tokenizer: Any) -> None:
    """It goes on later; what host memory cannot hold by itself is refused."""
    prompt = tokenizer.encode(books[1][5000:35_000])
    texts = [(prompt[:1300], 600), (prompt[1300:1700], 700)]  # they need 119 and 69 pages of 128
    wanted = [generate(plain.stub(), text, max_tokens=most, ignore_eos=True).tokens for text, most in texts]
    (first, most), (second, fewer) = texts
    for _ in range(5):  # on a busy machine the first may be over before the second needs its room
        before = count(small, "preemptions")
        call = small.stub().Generate(make_request(first, temperature=0, max_tokens=most, ignore_eos=True))
        tokens = list(next(call).token_ids)
        younger = generate(small.stub(), second, max_tokens=fewer, ignore_eos=True)
        for response in call:
            tokens += response.token_ids
        assert [tokens, younger.tokens] == wanted
        assert younger.speculation.preemptions == count(small, "preemptions") - before
        if younger.speculation.preemptions:
            break
    else:
        raise AssertionError("no session gave way in five tries")
    status, details = refusal(small, prompt[:1900], max_tokens=MOST - 1900)
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "maximum context length is 2043 tokens; your prompt has 1900 tokens, and max_tokens is 148" in details
    assert refusal_over_http(small, prompt[:1900], MOST - 1900) == (400, "context_length_exceeded")
    status, details = refusal(small, second, max_tokens=8, exactness=APPROXIMATE, sparsity="quest")
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "sparsity must be one of dense, streaming, pillar, sts, specattn, ahead; got 'quest'" in details
    wait_until_idle(small.http)
