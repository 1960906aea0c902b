"""Chats that all continue to the end of the context, in a target and a draft whose KV has no room for that."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.altered import PATIENT
from tests.client import metric, service_state, wait_until_idle
from tests.stack import Stack, start_gateway, start_services

CHATS, CONTEXT = 6, 240
TOPICS = ["the sea", "a long road in the hills", "the old house", "a ship", "winter in the town", "his brother"]
SETTINGS = ("--kv-tokens", "600", "--max-context", str(CONTEXT), "--prefill-chunk", "64", "--max-sessions", str(CHATS))
TARGET = ("-m", "tests.altered", PATIENT, "target_service")


@contextlib.contextmanager
def running() -> Iterator[Stack]:
    services = start_services(*SETTINGS, target_command=TARGET)
    gateway = start_gateway(services, "--max-context", str(CONTEXT))
    try:
        yield gateway
    finally:
        gateway.stop()
        services.stop()


def chats(stack: Stack, **fields: int) -> list[Any]:
    """Return the answers to all chats at once. No chat ends before the context does, unless `fields` limit it."""

    def ask(topic: str) -> Any:
        with OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0, timeout=400) as client:
            question: Any = [{"role": "user", "content": f"Tell me of {topic}. " * 4}]
            return client.chat.completions.create(
                model="tiny-target", messages=question, temperature=0, extra_body={"ignore_eos": True}, **fields
            )

    with ThreadPoolExecutor(CHATS) as pool:
        return list(pool.map(ask, TOPICS))


@pytest.fixture(scope="module")
def wanted(stack: Stack) -> list[str]:
    """Their answers, and more text behind them, from a target with room for all."""
    answers = chats(stack, max_tokens=CONTEXT)
    assert sum(answer.speculation["preemptions"] for answer in answers) == 0
    return [answer.choices[0].message.content for answer in answers]


def test_every_chat_gets_its_tokens_from_a_pool_that_is_too_small(wanted: list[str]) -> None:
    """Some sessions give way in target and draft; none is refused or gets another answer.

    test_offload.py does the same with too little host memory.
    """
    with running() as stack:
        assert service_state(stack.http, "target", "kv_pages") == 38
        answers = chats(stack)
        given_way = metric(stack.http, "num_preemptions_total")
        assert given_way > 0
        assert given_way == sum(answer.speculation["preemptions"] for answer in answers)
        assert metric(stack.http, "service_events_total", service="draft", name="declined_sessions") > 0
        wait_until_idle(stack.http)
    assert [answer.usage.total_tokens for answer in answers] == [CONTEXT] * CHATS
    for answer, longer in zip(answers, wanted, strict=True):
        assert longer.startswith(answer.choices[0].message.content)
