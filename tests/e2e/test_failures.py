"""Draft or target killed in mid-stream: no wrong token, no repeated token, and speculation comes back."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from protos import inference_pb2
from tests.client import generate, make_request, metric, service_state, wait_for, wait_until_idle
from tests.stack import Stack

TOKENS = 400


@pytest.fixture(scope="module")
def mortal(launch: Callable[..., Stack]) -> Stack:
    """A launch of its own, whose processes get killed."""
    return launch()


def _stream(
    stack: Stack, prompt: list[int], kill_after: int, pid: int
) -> tuple[list[int], float, inference_pb2.SpeculationSummary]:
    """Tokens of a greedy stream during which `pid` dies; the longest pause between messages after that."""
    tokens: list[int] = []
    pause, killed, last = 0.0, False, time.monotonic()
    request = make_request(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    summary = inference_pb2.SpeculationSummary()
    for response in stack.stub().Generate(request):
        now = time.monotonic()
        if killed:
            pause = max(pause, now - last)
        last = now
        tokens += response.token_ids
        summary = response.speculation
        if not killed and len(tokens) >= kill_after:
            os.kill(pid, signal.SIGKILL)
            killed, last = True, time.monotonic()
    return tokens, pause, summary


def test_draft_killed(mortal: Stack, books: list[str], tokenizer: Any) -> None:
    prompt = tokenizer.encode(books[0][:6000])[:500]
    expected = generate(mortal.stub(), prompt, max_tokens=TOKENS, ignore_eos=True).tokens
    pid = int(service_pid(mortal, "draft"))
    tokens, pause, _ = _stream(mortal, prompt, 40, pid)
    assert tokens == expected
    assert pause < 2, "plain decoding takes over within 2 s"
    wait_for(lambda: metric(mortal.http, "service_attached", service="target") == 1, 60, "Ray restarts the draft")
    drafts = metric(mortal.http, "spec_decode_num_drafts_total")
    again = generate(mortal.stub(), prompt, max_tokens=TOKENS, ignore_eos=True)
    assert again.tokens == expected
    assert again.speculation.accepted > 0
    assert metric(mortal.http, "spec_decode_num_drafts_total") > drafts
    assert service_pid(mortal, "draft") != pid
    wait_until_idle(mortal.http)


def test_draft_killed_twice_while_it_speculates_again(mortal: Stack, books: list[str], tokenizer: Any) -> None:
    """A session that outlives its draft is taken up by the next one in mid-stream."""
    prompt = tokenizer.encode(books[1][:6000])[:300]
    request = make_request(prompt, temperature=0, max_tokens=6000, ignore_eos=True)
    call = mortal.stub().Generate(request)
    pid = int(service_pid(mortal, "draft"))
    responses = iter(call)
    for _ in range(10):
        next(responses)
    os.kill(pid, signal.SIGKILL)

    def drafted_again() -> bool:
        next(responses)
        return service_state(mortal.http, "target", "drafted_sessions") == 1 and service_pid(mortal, "draft") != pid

    wait_for(drafted_again, 60, "the running session is drafted again")
    call.cancel()
    wait_until_idle(mortal.http)


def test_target_killed(mortal: Stack, books: list[str], tokenizer: Any) -> None:
    """The stream resumes from the ledger on the restarted target."""
    prompt = tokenizer.encode(books[2][:6000])[:500]
    expected = generate(mortal.stub(), prompt, max_tokens=TOKENS, ignore_eos=True).tokens
    tokens, _, _ = _stream(mortal, prompt, 40, int(service_pid(mortal, "target")))
    assert tokens == expected
    wait_until_idle(mortal.http, 30)


def service_pid(stack: Stack, service: str) -> float:
    return service_state(stack.http, service, "pid")
