"""Stored responses: a turn sends its own items alone, and the prompt is that of the whole conversation."""

import contextlib
import stat
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.sessions.response_store import ResponseStore
from orchestrator.text.replies import ReplyFormat
from specahead.wire.errors import NotFound
from tests.unit.gateway import MODEL, ScriptedRouter, router_of_chats, running_gateway
from tests.unit.test_http import CALL, WEATHER

ITEM = {"type": "message", "role": "user", "content": "x" * 100}


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def store_in(folder: Path, clock: Clock, most_bytes: float = 10_000) -> ResponseStore:
    return ResponseStore(str(folder / "responses.db"), 60.0, most_bytes, clock)


def test_a_conversation_is_found_by_its_caller_for_its_time(tmp_path: Path) -> None:
    """Each use lengthens the time of all its turns, and a new process finds them."""
    clock = Clock()
    with contextlib.closing(store_in(tmp_path, clock)) as store:
        store.write("a", "ann", None, [ITEM])
        store.write("b", "ann", "a", [ITEM, ITEM])
    assert stat.S_IMODE((tmp_path / "responses.db").stat().st_mode) == 0o600
    with contextlib.closing(store_in(tmp_path, clock)) as store:
        for clock.now in (0, 50, 100):
            assert store.read("b", "ann") == [ITEM] * 3
        clock.now = 150
        assert store.read("a", "ann") == [ITEM]
        for name, caller in (("b", "bob"), ("c", "ann")):
            with pytest.raises(NotFound, match="not found"):
                store.read(name, caller)
        clock.now = 161  # b was used at 100
        with pytest.raises(NotFound):
            store.read("b", "ann")


def test_the_least_recently_used_turns_go_first(tmp_path: Path) -> None:
    """A conversation that has lost a turn is not found at all."""
    clock = Clock()
    with contextlib.closing(store_in(tmp_path, clock, most_bytes=500)) as store:
        for clock.now, name, previous in ((1, "a", None), (2, "b", "a"), (3, "c", None)):
            store.write(name, "", previous, [ITEM])
        clock.now = 4
        store.read("a", "")
        store.write("d", "", None, [ITEM, ITEM])
        assert store.read("a", "") == [ITEM] and store.read("d", "") == [ITEM] * 2
        store.write("d", "", "d", [ITEM])  # a name that is taken stays what it is
        assert store.read("d", "") == [ITEM] * 2
        for name in ("b", "c"):
            with pytest.raises(NotFound):
                store.read(name, "")


async def test_a_turn_continues_a_stored_response(tokenizer: Any, tmp_path: Path) -> None:
    """With its calls, streamed or not; instructions are those of each request. Another key does not find it."""
    router = router_of_chats(tokenizer)
    router.answer = [f"I will look.{CALL}", "Sunny.", "Yes."]
    tool: Any = {"type": "function", **WEATHER["function"]}
    callers = Callers([Key("ann", digest_of("a")), Key("bob", digest_of("b"))])
    async with contextlib.AsyncExitStack() as entered:
        store = entered.enter_context(contextlib.closing(store_in(tmp_path, Clock())))
        gateway = running_gateway(router, reply_format=ReplyFormat("hermes"), callers=callers, responses=store)
        url = f"{await entered.enter_async_context(gateway)}/v1"
        ann, bob = (AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20) for key in "ab")
        first = await ann.responses.create(model=MODEL, input="Is it sunny?", instructions="Be brief.", tools=[tool])
        assert first.store and first.previous_response_id is None
        result: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "Sun."}
        more: Any = {"model": MODEL, "tools": [tool]}
        async with ann.responses.stream(**more, previous_response_id=first.id, input=[result]) as stream:
            second = await stream.get_final_response()
        assert second.previous_response_id == first.id
        third = await ann.responses.create(**more, previous_response_id=second.id, input="Sure?", store=False)
        record = router.opened[-1]
        prompt = tokenizer.decode(record.tokens[: record.prompt_tokens])
        assert "system" not in prompt
        assert f"user: Is it sunny?assistant: I will look.{CALL}tool: Sun.assistant: Sunny.user: Sure?" in prompt
        for client, name in ((ann, third.id), (bob, second.id)):
            with pytest.raises(NotFoundError, match="not found"):
                await client.responses.create(**more, previous_response_id=name, input="And?")


async def test_without_a_store_a_conversation_must_be_sent_along(tokenizer: Any) -> None:
    async with running_gateway(ScriptedRouter(tokenizer)) as url:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0, timeout=20)
        with pytest.raises(BadRequestError, match=r"no responses are stored here: .*response_store"):
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
