"""KV in host memory, in real services: the same tokens wherever KV lies, also when the host memory is full."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from specahead.models import TARGET
from tests.altered import PATIENT
from tests.client import APPROXIMATE, EXACT, generate, make_request, metric, service_state, wait_until_idle
from tests.plans import sparse_plan_file
from tests.stack import Stack

MOST = 1280  # tokens of a context, and of KV in host memory
SIZES = ("--max-model-len", str(MOST), "--kv-tokens", "800")
# A round that a slow machine decodes without the draft reads everything, which changes `approximate` answers.
FLAGS = ("--max-sessions", "8", "--prefill-chunk", "128", *SIZES)
# What a round reads depends on how it is made, which the policy would choose by the time that rounds take.
FIXED = ("--plan", sparse_plan_file(), "--speculation", '{"gamma": 4, "audit_share": 0}')
# GiB of host memory: tokens, keys and values, layers, heads, dimensions, bytes of a float32.
MEMORY = MOST * 2 * 10 * 4 * 64 * 4 / 2**30


@pytest.fixture(scope="module")
def small(launch: Callable[..., Stack]) -> Stack:
    """A launch whose target has fifty pages on the device and eighty in host memory."""
    return launch(*FLAGS, *FIXED, "--host-kv-memory", str(MEMORY), altered=PATIENT)


def answers(stack: Stack, cases: list[tuple[int, list[int]]], at_once: int, tokens: int = 24) -> list[list[int]]:
    """Return the tokens of each case, a pair of exactness and prompt."""
    stub = stack.stub()

    def run(case: tuple[int, list[int]]) -> list[int]:
        exactness, prompt = case
        return generate(stub, prompt, max_tokens=tokens, exactness=exactness, ignore_eos=True).tokens

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, cases))


def count(stack: Stack, name: str, service: str = "target") -> float:
    return metric(stack.http, "service_events_total", service=service, name=name)


def test_from_fifty_pages_the_answers_are_the_same(
    small: Stack, stack: Stack, books: list[str], tokenizer: Any
) -> None:
    """Requests run one after the other and all at once; /metrics shows where their KV went."""
    lengths = (60, 200, 840)  # one exceeds the device, and host memory holds all three
    prompts = [tokenizer.encode(book[5000:25_000])[:length] for book, length in zip(books, lengths, strict=False)]
    exact, approximate = ([(exactness, prompt) for prompt in prompts] for exactness in (EXACT, APPROXIMATE))
    wanted = answers(stack, exact + approximate, 1)
    assert answers(small, exact + approximate, 1) == wanted
    assert count(small, "kv_stages") > 0
    assert count(small, "kv_fetched_pages") > 0
    assert count(small, "kv_stored_pages") > 50
    assert count(small, "kv_offloads") >= 1
    assert service_state(small.http, "target", "kv_gpu_pages") == 50
    assert service_state(small.http, "target", "kv_offload_active") == 1
    assert answers(small, exact, 3) + answers(small, approximate, 3) == wanted
    assert count(small, "preemptions") == 0
    wait_until_idle(small.http)


def test_a_full_host_is_shared_by_many(small: Stack, stack: Stack, books: list[str], tokenizer: Any) -> None:
    """Together the sessions need more than there is: some give way, none is refused or gets another answer."""
    tokens = tokenizer.encode(books[3][5000:35_000])
    cases = [(EXACT, tokens[150 * i : 150 * (i + 1)]) for i in range(8)]
    before = count(small, "preemptions")
    assert answers(small, cases, 8, tokens=100) == answers(stack, cases, 8, tokens=100)
    assert count(small, "preemptions") > before
    wait_until_idle(small.http)


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


def test_what_host_memory_cannot_hold_by_itself_is_refused(small: Stack, books: list[str], tokenizer: Any) -> None:
    prompt = tokenizer.encode(books[1][5000:35_000])
    status, details = refusal(small, prompt[:1150], max_tokens=MOST - 1150)
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "maximum context length is 1275 tokens; your prompt has 1150 tokens, and max_tokens is 130" in details
    assert refusal_over_http(small, prompt[:1150], MOST - 1150) == (400, "context_length_exceeded")
