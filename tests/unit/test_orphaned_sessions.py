"""What a lost orchestrator leaves at a target, a client takes up by the same request through another one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.cluster.directory import Directory
from orchestrator.sessions.ledger import Record
from orchestrator.sessions.router import Router
from specahead.config.access import Timeouts
from specahead.engine.sampling.distributions import Sampling
from specahead.wire.access import PeerAccess
from specahead.wire.convert import commit_to_bytes
from specahead.wire.errors import Unavailable
from specahead.wire.messages import At, Commit, Exactness, FinishReason, Open
from target_service.orphaned_sessions import SessionRecord, StreamRecords
from tests.unit.clock import Clock
from tests.unit.test_target_streams import PROMPT, target_at
from tests.unit.until import until

SAMPLED = Sampling(temperature=1.0, seed=5)


def record(name: str = "a", **values: Any) -> Record:
    given = {"max_tokens": 120, "sampling": SAMPLED, "caller": "alice"} | values
    return Record(Open(name, list(PROMPT), len(PROMPT), stop_token_ids=[], exactness=Exactness.EXACT, **given))


class Gateway:
    """A router that can be lost by itself, before the end of what it is used for."""

    def __init__(self, address: str) -> None:
        self.router = Router(Directory({"target": address}), PeerAccess(), 30)
        self._connected = self.router.connected_to_targets()

    async def start(self) -> "Gateway":
        await self._connected.__aenter__()
        await until(lambda: self.router.connected)
        return self

    async def stop(self) -> None:
        await self._connected.__aexit__(None, None, None)

    @property
    def left(self) -> set[str]:
        """The sessions that it knows to be left."""
        return self.router.targets["target"].view.left


@contextlib.asynccontextmanager
async def two_gateways(**settings: Any) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Gateways over one target, the first of which the test stops."""
    async with target_at(**settings) as (address, _):
        first, second = [await Gateway(address).start() for _ in range(2)]
        yield first, second
        await second.stop()


async def some_of(gateway: Gateway, wanted: Record, tokens: int) -> list[int]:
    """Return what comes of a session until there are so many tokens; its gateway is stopped then."""
    got: list[int] = []
    with contextlib.suppress(Unavailable):
        async for commit in gateway.router.stream(wanted):
            got += commit.tokens
            if len(got) >= tokens and gateway.router.targets:
                await gateway.stop()
    return got


async def all_of(gateway: Gateway, wanted: Record) -> list[int]:
    return [token async for commit in gateway.router.stream(wanted) for token in commit.tokens]


async def test_a_client_goes_on_through_another_gateway_with_the_tokens_that_it_has() -> None:
    """Though its request has another seed there: what was committed is told again, and counted as it was."""
    async with two_gateways() as (first, second):
        got = await some_of(first, record(), 30)
        await until(lambda: second.left == {"a"})
        again = record(sampling=replace(SAMPLED, seed=77))
        tokens = await all_of(second, again)
        assert len(tokens) == 120 and tokens[: len(got)] == got and 30 <= len(got) < 120
        assert again.totals.rounds + again.totals.plain_rounds == 120, "each round once"
        await until(lambda: not second.left)
        alone = await all_of(second, record("b", sampling=SAMPLED))
        assert alone == tokens, "with the seed of the first"


async def test_a_session_that_waits_at_a_full_target_goes_on_through_another_gateway() -> None:
    """It had been accepted when its gateway was lost: the limit of the queue, which has no place, is not for it."""
    async with two_gateways(max_sessions=1, max_queued=1) as (first, second):
        running = asyncio.create_task(all_of(second, record("runs")))
        await until(lambda: second.router.targets["target"].view.report.sessions == 1)
        waiting = asyncio.create_task(some_of(first, record(), 1))
        await until(lambda: second.router.targets["target"].view.report.waiting == 1)
        await first.stop()
        assert await waiting == []
        await until(lambda: second.left == {"a"})
        other = asyncio.create_task(all_of(second, record("waits")))
        await until(lambda: second.router.targets["target"].view.report.waiting == 1)
        assert len(await all_of(second, record())) == len(await running) == len(await other) == 120


async def test_an_answer_whose_end_nobody_got_is_told_again() -> None:
    async with two_gateways() as (first, second):
        got = await all_of(first, record(max_tokens=20))
        await first.stop()
        await until(lambda: second.left == {"a"})
        again = record(max_tokens=20, sampling=replace(SAMPLED, seed=77))
        assert await all_of(second, again) == got and again.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("other", [{"caller": "bob"}, {"max_tokens": 119}, {"sampling": Sampling(0.5, seed=5)}])
async def test_another_request_of_that_name_gets_nothing_of_it(other: dict[str, Any]) -> None:
    async with two_gateways() as (first, second):
        got = await some_of(first, record(), 30)
        await until(lambda: second.left == {"a"})
        fresh = record(**{"sampling": replace(SAMPLED, seed=78)} | other)
        assert (await all_of(second, fresh))[:30] != got[:30]


async def test_what_is_left_is_kept_for_resume_timeout() -> None:
    async with two_gateways(timeouts=Timeouts(resume=0.3)) as (first, second):
        await some_of(first, record(), 10)
        await until(lambda: second.left == {"a"})
        await until(lambda: not second.left)
        assert len(await all_of(second, record(max_tokens=5))) == 5


def opened(name: str, tokens: int = 3, **values: Any) -> Open:
    return Open(f"{name}@x.1", [1] * tokens, 3, 9, [], SAMPLED, Exactness.EXACT, **values)


def commit(name: str, base: int, *tokens: int, reason: FinishReason = FinishReason.NONE) -> Commit:
    return Commit(At(f"{name}@x.1", 0, 0, base), list(tokens), finish_reason=reason)


def test_a_session_that_was_resumed_before_is_told_from_its_prompt_on() -> None:
    written = SessionRecord(opened("a", 5))
    told = [commit("a", 5, 7), commit("a", 6, 8, 9)]
    for each in told:
        written.add(each, commit_to_bytes(each))
    assert written.commits == told
    taken_up = written.continued_by(replace(opened("a"), session="a@y.2"))
    assert [(each.at.session, each.at.base, each.tokens) for each in taken_up.commits] == [
        ("a@y.2", 3, [1, 1]),
        ("a@y.2", 5, [7]),
        ("a@y.2", 6, [8, 9]),
    ]
    assert taken_up.reopening().tokens == [1, 1, 1, 1, 1, 7, 8, 9] and taken_up.reopening().resumed


def test_the_end_of_an_answer_is_kept_until_all_of_it_was_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("target_service.orphaned_sessions.time", clock)
    written, records = SessionRecord(opened("a")), StreamRecords(8)
    told = [commit("a", 3, 7), commit("a", 4, 8, reason=FinishReason.STOP)]
    for each in told:
        written.add(each, commit_to_bytes(each))
    records.open(written.continued_by(opened("a")))
    records.write(told[0], b"")
    clock.now = 100
    records.write(commit("other", 3, 1), b"")
    (left,) = records
    assert left.commits == told and left.has_ended and "a@x.1" in records
    records.write(told[1], b"")
    assert "a@x.1" not in records and list(records) == [left]
