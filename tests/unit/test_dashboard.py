"""The dashboard: who is told what of which session, that all of it is bounded, and the page in a real browser."""

import asyncio
import json
import os
import re
import warnings
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from orchestrator.api.dashboard import feed as feeds
from orchestrator.api.dashboard.feed import Feed
from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.sessions.ledger import LATEST_ROUNDS, Record
from specahead.engine.sampling.distributions import Sampling
from specahead.wire.messages import At, Commit, Exactness, Open, RoundFigures
from tests.browser import CHROMIUM, browsing
from tests.unit.gateway import MODEL, ScriptedRouter, running_gateway

CALLERS = Callers([Key("alice", digest_of("alice's key")), Key("bob", digest_of("bob's key"))])
ALICE, BOB = ({"Authorization": f"Bearer {name}'s key"} for name in ("alice", "bob"))
ASK = {"model": MODEL, "prompt": "The secret of the sea", "max_tokens": 8, "exactness": "approximate"}


def record(name: str) -> Record:
    return Record(Open(name, [1, 2, 3], 3, 100, [], Sampling(0.0), Exactness.APPROXIMATE))


def commit(tokens: int = 3) -> Commit:
    counts = {"kv_tokens_read": 10, "kv_tokens_total": 100, "kv_tokens_fetched": 4}
    return Commit(At("a", 0, 0, 3), [5] * tokens, drafted=4, accepted=tokens - 1, figures=RoundFigures(**counts))


@pytest.fixture(autouse=True)
def anyone() -> None:
    """Whatever test ran before: sessions are opened by who has no key, unless a test says otherwise."""
    Callers([]).admit("")


# What viewers are told


async def test_who_comes_later_gets_a_snapshot_and_is_told_no_others_ids() -> None:
    feed, kept = Feed(), record("mine")
    CALLERS.admit("alice's key")
    feed.open(kept)
    kept.latest += [commit()] * 100
    kept.tokens += [5] * 300
    for name, shown in (("alice", "mine"), ("bob", None)):
        with feed.viewer(name) as viewer:
            (session,) = (feed.take(viewer) or {})["sessions"]
            assert (session["request"], session["tokens"], len(session["rounds"])) == (shown, 300, LATEST_ROUNDS)


def test_what_is_told_at_once_is_bounded() -> None:
    feed = Feed()
    with feed.viewer("") as viewer:
        feed.take(viewer)
        watched = feed.open(record("a"))
        for _ in range(feeds.MOST_ROUNDS + 50):
            feed.round(watched, commit(), 0.1, False)
        told = feed.take(viewer)
        assert told is not None and len(told["rounds"]) == feeds.MOST_ROUNDS
        assert told["sums"]["rounds"] == feeds.MOST_ROUNDS + 50
        for i in range(feeds.MOST_CHANGES + 50):
            feed.open(record(f"b{i}"))
        told = feed.take(viewer)
        assert told is not None and told["type"] == "snapshot"
        assert len(told["sessions"]) == feeds.MOST_SESSIONS
        assert told["sessions"][-1]["request"] == f"b{feeds.MOST_CHANGES + 49}"


# Over HTTP


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_the_page_is_open_and_knows_nothing(tokenizer: Any) -> None:
    """What it asks for needs a key; it loads nothing from elsewhere, and its policy lets it run nothing else."""
    async with running_gateway(ScriptedRouter(tokenizer), callers=CALLERS) as url, aiohttp.ClientSession(url) as client:
        async with client.get("/dashboard") as response:
            text, policy = await response.text(), response.headers["Content-Security-Policy"]
            assert response.status == 200 and MODEL not in text
        for path in ("/dashboard/events", "/dashboard/"):
            async with client.get(path) as response:
                assert response.status == 401, path
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=(?!\"data:)", text)


async def test_events_come_as_they_happen_and_end_with_their_reader(tokenizer: Any) -> None:
    router = ScriptedRouter(tokenizer)
    async with (
        running_gateway(router, callers=CALLERS) as url,
        aiohttp.ClientSession(url, headers=BOB) as bob,
        aiohttp.ClientSession(url, headers=ALICE) as alice,
        asyncio.timeout(20),
    ):
        async with alice.get("/dashboard/events") as stream:
            events = events_of(stream)
            assert [(await anext(events))["type"] for _ in range(3)] == ["hello", "status", "snapshot"]
            async with bob.post("/v1/completions", json=ASK) as response:
                assert response.status == 200
            told = await anext(event async for event in events if event["type"] == "rounds")
            assert told["sums"]["tokens"] == 8 and [round_[1] for round_ in told["rounds"]] == [2, 2, 2, 2]
            assert told["opened"][0]["request"] is None and told["ended"] == [[1, "length"]]
            assert "secret" not in json.dumps(told)
        for _ in range(2 * feeds.MOST_VIEWERS):  # each leaves before the next comes
            async with alice.get("/dashboard/events") as stream:
                while stream.status == 429:
                    await asyncio.sleep(0.05)
                    stream = await alice.get("/dashboard/events")
                await anext(events_of(stream))
                stream.close()


async def test_who_looks_is_sent_away_when_the_key_is_gone(tokenizer: Any) -> None:
    callers = Callers([Key("alice", digest_of("alice's key"))])
    async with (
        running_gateway(ScriptedRouter(tokenizer), callers=callers) as url,
        aiohttp.ClientSession(url, headers=ALICE) as alice,
        alice.get("/dashboard/events") as stream,
        asyncio.timeout(20),
    ):
        events = events_of(stream)
        await anext(events)
        callers.replace([Key("bob", digest_of("bob's key"))])
        assert {event["type"] async for event in events} <= {"status", "snapshot"}


# In a browser


@pytest.fixture
def chromium() -> str:
    if CHROMIUM is None:
        reason = "no Chromium on this machine (apt-get install chromium): the page is not tried in a browser"
        if os.environ.get("CI"):
            warnings.warn(f"CI: {reason}", stacklevel=1)
        pytest.skip(reason)
    return CHROMIUM


@pytest.mark.usefixtures("chromium")
async def test_a_person_looks_at_the_page(tokenizer: Any) -> None:
    router = ScriptedRouter(tokenizer)
    router.gate.clear()
    async with running_gateway(router, callers=CALLERS) as url, browsing(f"{url}/dashboard", dark=True) as page:
        await page.until("!document.getElementById('door').hidden && document.getElementById('main').hidden")
        await enter(page, "eve's key")
        await page.until("document.getElementById('why').textContent.includes('not allowed here')")
        await enter(page, "alice's key")
        await page.until("document.getElementById('state').textContent === 'live'")
        assert await page.value("sessionStorage.getItem('specahead key')") == "alice's key"
        assert await page.value("getComputedStyle(document.documentElement).colorScheme") == "dark"
        await page.value("document.getElementById('ask').requestSubmit()")
        await page.until("document.querySelectorAll('#sessions tr').length === 2")
        router.gate.set()
        for kind in ("exact", "approximate"):
            await page.until(f"document.getElementById('f-{kind}').textContent.includes('accepted a round')")
            assert (await page.value(f"document.getElementById('a-{kind}').textContent")).startswith("The sea was calm")
        await page.until("document.getElementById('count').textContent === '0 running, 2 ended'")
        await page.until("document.getElementById('t-accept').textContent === '25 %'")
        strips = "[...document.querySelectorAll('#sessions canvas')].map(strip => strip.getAttribute('aria-label'))"
        assert all("drafted tokens accepted" in label for label in await page.value(strips))
        unnamed = "[...document.querySelectorAll('svg[role=img], canvas[role=img]')].filter(e => !e.ariaLabel).length"
        assert await page.value(unnamed) == 0
        # The answers to the two requests without a right key are told of by the browser; nothing else is wrong.
        assert [error for error in page.errors if "401" not in error] == []
        await page.value("document.getElementById('leave').click()")
        await page.until("document.readyState === 'complete' && !document.getElementById('door').hidden")
        assert await page.value("sessionStorage.length") == 0


async def enter(page: Any, key: str) -> None:
    await page.value(f"document.getElementById('key').value = {json.dumps(key)}")
    await page.value("document.getElementById('enter').requestSubmit()")
