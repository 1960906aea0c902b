"""From a prepared request to pieces of text: what was held back comes at the end, nothing after a stop."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.requests.requests import CompletionRequest, read_request
from orchestrator.sessions.generation import Chunk, Frontend
from orchestrator.sessions.ledger import Record
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.observer import Observer
from specahead.wire.errors import ServiceError, Unavailable
from specahead.wire.messages import At, Commit, FinishReason
from tests.unit.gateway import LIMITS, MODEL, ScriptedRouter

REPLACEMENT = "\ufffd"


class Failing(ScriptedRouter):
    """Keeps what all its requests are told at the end. stuck: nothing comes behind a session's first tokens.

    aborted_at: the round in whose place an abort comes. ahead: tokens that are committed behind each round, but not
    told yet.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.told: list[ServiceError] = []
        self.stuck = False
        self.aborted_at = -1
        self.ahead: list[int] = []

    async def stream(self, record: Record) -> AsyncGenerator[Commit]:
        async with aclosing(super().stream(record)) as commits:
            async for commit in commits:
                record.tokens += self.ahead
                if len(record.latest) == self.aborted_at:
                    yield Commit(At(record.session, 0, 0, 0), [], finish_reason=FinishReason.ABORT)
                    return
                yield commit
                if self.stuck:
                    await asyncio.Event().wait()

    def leave(self, error: ServiceError) -> None:
        self.told.append(error)


@pytest.fixture
def router(tokenizer: Any) -> Failing:
    return Failing(tokenizer)


@pytest.fixture
def frontend(router: Any) -> Frontend:
    return Frontend(router, router.tokenizer, LIMITS, Observer(Metrics(MODEL), router.tokenizer), "tiny-draft")


def start(frontend: Frontend, **fields: Any) -> AsyncIterator[Chunk]:
    request = read_request(CompletionRequest, {"prompt": "The sea", "max_tokens": 50} | fields)
    return frontend.generate(frontend.prepare(request, [[5, 6, 7]]), request)


async def text_of(chunks: AsyncIterator[Chunk]) -> tuple[str, FinishReason]:
    pieces = [chunk async for chunk in chunks]
    assert all(chunk.finish_reason is FinishReason.NONE for chunk in pieces[:-1])
    return "".join(chunk.text for chunk in pieces), pieces[-1].finish_reason


async def test_text_held_back_for_a_stop_string_comes_at_the_end(frontend: Frontend, router: Failing) -> None:
    router.answer = "The sea was calm"
    assert await text_of(start(frontend, stop=[" calm, and"])) == ("The sea was calm", FinishReason.STOP)


@pytest.mark.parametrize("stop", [[], ["never there"]])
async def test_a_character_that_stays_incomplete_is_replaced_and_not_lost(
    frontend: Frontend, router: Failing, stop: list[str]
) -> None:
    router.answer = "x🙂"
    count = len(router.tokenizer.encode(router.answer, add_special_tokens=False)) - 1
    got = await text_of(start(frontend, max_tokens=count, stop=stop))
    assert got == ("x" + REPLACEMENT, FinishReason.LENGTH)


async def test_nothing_comes_behind_a_stop_string(frontend: Frontend, router: Failing) -> None:
    assert await text_of(start(frontend, stop=[" calm"])) == ("The sea was", FinishReason.STOP)
    assert router.running == 0


@pytest.mark.parametrize(("aborted_at", "stop"), [(2, []), (-1, [" calm"])])
async def test_usage_counts_what_was_told_and_not_what_was_committed_since(
    frontend: Frontend, router: Failing, aborted_at: int, stop: list[str]
) -> None:
    """The target goes on until it knows of an abort, or of a stop string."""
    router.aborted_at, router.ahead = aborted_at, [5, 6, 7]
    chunks = [chunk async for chunk in start(frontend, stop=stop)]
    assert chunks[-1].completion_tokens == sum(len(chunk.tokens) for chunk in chunks) > 0


def until(router: Failing, text: str) -> list[int]:
    """Return the answer's tokens up to the one that completes a text."""
    tokens = router.tokenizer.encode(router.answer, add_special_tokens=False)
    return next(tokens[:n] for n in range(len(tokens) + 1) if text in router.tokenizer.decode(tokens[:n]))


@pytest.mark.parametrize("per_round", [1, 2, 5, 99])
@pytest.mark.parametrize("fields", [{}, {"include_stop_str_in_output": True}])
async def test_a_stop_string_cuts_the_round_that_completes_it(
    frontend: Frontend, router: Failing, per_round: int, fields: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens, log probabilities, what they cost and what is written down end with its last token, however many tokens
    a round has."""
    router.per_round = per_round
    caller = Callers([Key("alice", digest_of("a"), tokens_per_minute=1000)]).admit("a")
    caller.clock, caller.at = lambda: 0.0, 0.0
    wanted = until(router, " calm, and")
    with caplog.at_level(logging.INFO):
        chunks = [chunk async for chunk in start(frontend, stop=[" calm, and"], logprobs=0, **fields)]
    assert [token for chunk in chunks for token in chunk.tokens] == wanted
    assert sum(len(chunk.logprobs) for chunk in chunks) == len(wanted)
    assert chunks[-1].completion_tokens == len(wanted) == 1000 - 3 - caller.tokens
    assert chunks[-1].finish_reason is FinishReason.STOP
    (record,) = router.opened
    assert record.generated == wanted
    (done,) = (entry for entry in caplog.records if entry.message == "request done")
    assert vars(done)["tokens"] == len(wanted) and vars(done)["outcome"] == "stop"


@pytest.mark.parametrize("per_round", [1, 2, 5, 99])
async def test_a_stop_string_may_begin_within_min_tokens_and_end_behind_them(
    frontend: Frontend, router: Failing, per_round: int
) -> None:
    """As in vLLM; one that ends within them is text."""
    router.per_round = per_round
    length, stop = len(until(router, " was calm")), [" was calm"]
    assert length > len(until(router, " was")), "it is of several tokens"
    for min_tokens in range(length):
        assert await text_of(start(frontend, stop=stop, min_tokens=min_tokens)) == ("The sea", FinishReason.STOP)
    assert await text_of(start(frontend, stop=stop, min_tokens=length)) == (router.answer, FinishReason.STOP)


async def test_the_token_that_ends_the_text_is_shown_if_that_is_asked_for(frontend: Frontend, router: Failing) -> None:
    end = router.tokenizer.decode([LIMITS.stop_token_ids[0]])
    shown = start(frontend, include_stop_str_in_output=True, skip_special_tokens=False)
    assert await text_of(shown) == (f"{router.answer}{end}", FinishReason.STOP)
    assert await text_of(start(frontend, skip_special_tokens=False)) == (router.answer, FinishReason.STOP)


async def test_leaving_early_ends_all_choices(frontend: Frontend, router: Failing) -> None:
    router.stuck = True
    chunks = start(frontend, n=3, seed=1)
    await anext(chunks)
    async with asyncio.timeout(5):
        await chunks.aclose()  # type: ignore[attr-defined]
    assert router.running == 0


async def test_a_draining_server_takes_no_requests_and_ends_those_that_outlast_the_grace(
    frontend: Frontend, router: Failing
) -> None:
    router.gate.clear()
    reading = asyncio.create_task(text_of(start(frontend)))
    await asyncio.sleep(0)
    draining = asyncio.create_task(frontend.drain(0.3))
    await asyncio.sleep(0.1)
    assert router.running == 1 and not router.told, "it is given the grace"
    with pytest.raises(Unavailable, match="shutting down"):
        start(frontend)
    await draining
    assert [type(error) for error in router.told] == [Unavailable]
    reading.cancel()
