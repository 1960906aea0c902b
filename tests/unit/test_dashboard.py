"""The dashboard: who is told what of which session, that all of it is bounded, and the page in a real browser."""

import asyncio
import json
import math
import os
import random
import re
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.api.dashboard import feed as feeds
from orchestrator.api.dashboard.feed import Feed, Watched
from orchestrator.api.dashboard.history import BUCKETS, MOST_SAMPLES, SAMPLE_FIELDS, SAMPLE_SECONDS, History
from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.sessions import observer
from orchestrator.sessions.ledger import LATEST_ROUNDS, Record
from specahead.engine.sampling.distributions import Sampling
from specahead.wire.messages import At, Commit, Exactness, Open, Proposer, RoundFigures
from tests.browser import CHROMIUM, browsing
from tests.unit.gateway import LIMITS, MODEL, ScriptedRouter, running_gateway

CALLERS = Callers([Key("alice", digest_of("alice's key")), Key("bob", digest_of("bob's key"))])
ALICE, BOB = ({"Authorization": f"Bearer {name}'s key"} for name in ("alice", "bob"))
ASK = {"model": MODEL, "prompt": "The secret of the sea", "max_tokens": 8, "exactness": "approximate"}


def record(name: str) -> Record:
    return Record(Open(name, [1, 2, 3], 3, 100, [], Sampling(0.0), Exactness.APPROXIMATE))


def commit(tokens: int = 3) -> Commit:
    return Commit(At("a", 0, 0, 3), [5] * tokens, drafted=4, accepted=tokens - 1, figures=figures_of(10, 4))


def figures_of(read: int, fetched: int) -> RoundFigures:
    return RoundFigures(kv_tokens_read=read, kv_tokens_total=100, kv_tokens_fetched=fetched)


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
            assert (session["request"], session["tokens"], len(session["latest"])) == (shown, 300, LATEST_ROUNDS)


async def test_who_comes_later_sees_the_last_sessions_that_ended() -> None:
    feed = Feed()
    CALLERS.admit("alice's key")
    for i in range(feeds.MOST_ENDED + 5):
        watched = feed.open(kept := record(f"a{i}"))
        kept.latest.append(commit())
        kept.totals.add(commit())
        feed.round(watched, commit(), 0.5)
        feed.end(watched, "length", 2.0)
    for name, shown in (("alice", "a34"), ("bob", None)):
        with feed.viewer(name) as viewer:
            told = (feed.take(viewer) or {})["sessions"]
            assert len(told) == feeds.MOST_ENDED and told[-1]["request"] == shown
            assert (told[-1]["ended"], told[-1]["seconds"], told[-1]["first_seconds"]) == ("length", 2.0, 0.5)
            assert (told[-1]["accepted"], told[-1]["kv_fetched"], len(told[-1]["latest"])) == (2, 4, 1)


def test_rounds_that_screened_are_listed_before_the_one_that_confirmed_them() -> None:
    feed, watched = Feed(), Watched(7, "", record("a"))
    confirmed = replace(commit(), proposer=Proposer.DRAFT, screening_drafted=[4, 3], screening_accepted=[4, 1])
    with feed.viewer("") as viewer:
        feed.take(viewer)
        feed.round(watched, confirmed, 0.1)
        told = feed.take(viewer)
    assert told is not None and told["rounds"] == [
        (7, 0, 4, 4, 3, 0, 0, 0),
        (7, 0, 3, 1, 3, 0, 0, 0),
        (7, 3, 4, 2, 3, 10, 100, 4),
    ]


def test_what_is_told_at_once_is_bounded() -> None:
    feed = Feed()
    with feed.viewer("") as viewer:
        feed.take(viewer)
        watched = feed.open(record("a"))
        for _ in range(feeds.MOST_ROUNDS + 50):
            feed.round(watched, commit(), 0.1)
        told = feed.take(viewer)
        assert told is not None and len(told["rounds"]) == feeds.MOST_ROUNDS
        for i in range(feeds.MOST_CHANGES + 50):
            feed.open(record(f"b{i}"))
        told = feed.take(viewer)
        assert told is not None and told["type"] == "snapshot"
        assert len(told["sessions"]) == feeds.MOST_SESSIONS
        assert told["sessions"][-1]["request"] == f"b{feeds.MOST_CHANGES + 49}"


# The last hour


def test_an_hour_is_kept_in_sums() -> None:
    now = [1000.0 * SAMPLE_SECONDS]
    history = History(lambda: now[0])
    history.open()
    history.open()
    history.round(replace(commit(), proposer=Proposer.LOOKUP, cached_tokens=2), 3, 0.25, True)
    history.round(
        replace(commit(), screening_drafted=[2], screening_accepted=[2], proposer=Proposer.SELF), 3, 0.5, False
    )
    history.end(4.0)
    history.end(None)
    (first,) = history.since(0)
    assert (first.time, first.running, first.tokens, first.drafted, first.accepted) == (5000, 2, 6, 10, 6)
    assert (first.rounds_by_proposer, first.accepted_at) == ([0, 1, 2, 0], [3, 3, 0, 0])
    assert (first.kv_read, first.kv_total, first.kv_fetched) == (20, 200, 8)
    assert (first.prompt_tokens, first.cached_tokens) == (3, 2)
    assert (first.first, first.between, first.turn) == (
        {-2 * BUCKETS: 1},
        {round(BUCKETS * math.log2(0.5 / 3)): 3},
        {2 * BUCKETS: 1},
    )
    for _ in range(MOST_SAMPLES + 9):
        now[0] += SAMPLE_SECONDS
        history.open()
    assert len(history.since(0)) == MOST_SAMPLES and history.since(0)[0].time == now[0] - 3600 + SAMPLE_SECONDS
    assert [sample.running for sample in history.since(int(now[0]) - SAMPLE_SECONDS)] == [
        MOST_SAMPLES + 8,
        MOST_SAMPLES + 9,
    ]
    now[0] += 3600 + SAMPLE_SECONDS
    assert history.since(0) == []


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
        for path in ("/dashboard/events", "/dashboard/story", "/dashboard/"):
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
            assert [round_[1] for round_ in told["rounds"]] == [2, 2, 2, 2]
            assert told["opened"][0]["request"] is None
            assert [(session["session"], session["ended"], session["tokens"]) for session in told["ended"]] == [
                (1, "length", 8)
            ]
            assert "secret" not in json.dumps(told)
            status = await anext(event async for event in events if event["type"] == "status")
            sample = dict(zip(SAMPLE_FIELDS, status["samples"][-1], strict=True))
            assert (sample["tokens"], sample["running"], sum(sample["turn"].values())) == (8, 1, 1)
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
        await page.until("document.querySelectorAll('#sessions tr').length === 1")
        router.gate.set()
        for kind in ("exact", "approximate"):
            await page.until(f"document.getElementById('f-{kind}').textContent.includes('accepted a round')")
            assert (await page.value(f"document.getElementById('a-{kind}').textContent")).startswith("The sea was calm")
        await page.until("document.getElementById('verdict').textContent.endsWith('The answers are the same.')")
        await page.until("document.getElementById('count').textContent === '0 running, 2 ended'")
        await page.until("document.getElementById('t-accept').textContent === '25 %'")
        strips = "[...document.querySelectorAll('#sessions canvas')].map(strip => strip.getAttribute('aria-label'))"
        assert all("proposed tokens accepted" in label for label in await page.value(strips))
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


class Routed(ScriptedRouter):
    """Its rounds differ in who proposes, and read a part of the KV where that is asked for; answers differ then."""

    async def stream(self, record: Record) -> AsyncGenerator[Commit]:
        sparse = record.asked.exactness is Exactness.APPROXIMATE
        self.answer = self.answer if not sparse else str(self.answer).replace("glad", "rather tired")
        async for commit in super().stream(record):
            who = Proposer.LOOKUP if commit.at.round % 4 == 1 else Proposer.DRAFT
            read = figures_of(100 - 70 * sparse, 20 * sparse)
            record.totals.figures = record.totals.figures.plus(read)
            made = replace(commit, proposer=who, figures=read)
            record.latest[-1] = made
            yield made
            await asyncio.sleep(0.02)


def an_hour_of_use() -> History:
    """Return a history in which the load rises and falls, and drafts are accepted less and less."""
    rng, end = random.Random(0), time.time()
    now = [end - 3600.0]
    history = History(lambda: now[0] or time.time())
    while now[0] < end:
        busy = 1 + math.sin((now[0] - end) / 500)
        for _ in range(rng.randint(0, round(4 * busy))):
            history.open()
            history.round(
                replace(commit(1), drafted=0, cached_tokens=1500), 2400, rng.lognormvariate(-1 + busy / 2, 0.5), True
            )
            for _ in range(rng.randint(2, 12)):
                accepted = min(4, int(rng.expovariate(0.3 + 0.2 * busy)))
                who, share = rng.choice((Proposer.DRAFT, Proposer.DRAFT, Proposer.LOOKUP)), rng.choice((100, 30, 12))
                read = figures_of(share, share // 5 if share < 100 else 0)
                made = replace(commit(accepted + 1), accepted=accepted, proposer=who, figures=read)
                history.round(made, 2400, rng.lognormvariate(-2.6 + busy / 4, 0.3), False)
            history.end(rng.lognormvariate(0.5 + busy / 2, 0.5))
        now[0] += SAMPLE_SECONDS
    now[0] = 0.0
    return history


@pytest.mark.usefixtures("chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
async def test_the_page_looks_right_on_a_screen_and_on_a_phone(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int, dark: bool
) -> None:
    """The last hour is there on opening, the answers' differences are marked, and nothing is wider than the window."""
    monkeypatch.setattr(observer, "History", an_hour_of_use)
    async with (
        running_gateway(Routed(tokenizer), replace(LIMITS, max_context=32768)) as url,
        browsing(f"{url}/dashboard", width, 844 if width < 500 else 900, dark) as page,
    ):
        await page.until("document.getElementById('state').textContent === 'live'")
        await page.value("document.querySelector('[data-minutes=\"60\"]').click()")
        await page.until("document.querySelectorAll('#c-read rect').length > 60")
        for chart in ("rate", "first", "turn", "between", "accept", "gamma"):
            assert await page.value(
                f"document.querySelector('#c-{chart} path').getAttribute('d').split('L').length > 40"
            ), chart
        await page.value("document.getElementById('length').value = '8000'")
        await page.value("document.getElementById('length').dispatchEvent(new Event('change'))")
        await page.until("document.getElementById('prompt').value.includes('The pass key of Alice is')")
        count = "ask('tokenize', post({model, prompt: document.getElementById('prompt').value})).then(a => a.json())"
        assert 8000 <= (await page.value(count))["count"] < 9000
        await page.value("document.getElementById('ask').requestSubmit()")
        await page.until("document.getElementById('verdict').textContent.includes('differ')")
        marked = "[...document.querySelectorAll('#a-{} mark')].map(mark => mark.textContent.trim())"
        assert await page.value(marked.format("exact")) == ["glad"]
        assert await page.value(marked.format("approximate")) == ["rather", "tired"]
        await page.until("document.querySelectorAll('#sessions tr.over').length === 2")
        reasons = await page.value("document.getElementById('reasons').innerText")
        assert "fetched from host memory" in reasons and "was there already" in reasons
        picture = tmp_path / f"dashboard-{width}{'-dark' * dark}.png"
        picture.write_bytes(await page.picture())
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []
