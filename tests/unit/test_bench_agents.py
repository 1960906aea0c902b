"""What `bench agents` asks of a server, and what it makes of the answers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiohttp import web

from specahead import models
from specahead.cli.main import main
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.benchmarks import arrivals
from specahead.lab.benchmarks.agents import row_of
from specahead.lab.benchmarks.arrivals import load_of
from specahead.lab.benchmarks.completions import Answered

LOAD = ["--agents", "2", "3", "--turns", "3", "--context", "20", "30", "--added", "5", "--generated", "4"]


class Server:
    """Answers completions with tokens 50, 51 and so on, two a message. tells_ids: whether it returns token ids."""

    def __init__(self, tells_ids: bool) -> None:
        self.tells_ids = tells_ids
        self.asked: list[dict[str, Any]] = []
        self.refuses = 0  # prompts of so many tokens
        self.url = ""
        self._loop = asyncio.new_event_loop()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "played"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if len(body["prompt"]) == self.refuses:
            return web.json_response({"error": "too long"}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, body["max_tokens"], 2):
            choice: dict[str, Any] = {"text": "ab"} | (
                {"token_ids": [50 + start, 51 + start]} if self.tells_ids else {}
            )
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.completions)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> "Server":
        self._loop.run_until_complete(self.start())
        self._thread = Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(params=[True, False], ids=["ids", "text alone"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as served:
        yield served


def test_each_turn_goes_on_with_the_last_ones_answer(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "agents.json", tmp_path / "agents.png"
    main(["bench", "agents", "--url", server.url, *LOAD, "--pause", "0", "--json", str(file), "--plot", str(plot)])
    content = json.loads(file.read_text())
    assert [(row["agents"], row["turns"]) for row in content["rows"]] == [(2, 6), (3, 9)]
    assert content["server returns token ids"] == server.tells_ids
    assert ("returns no token ids" in capsys.readouterr().out) == (not server.tells_ids)
    for row in content["rows"]:
        assert row["tokens_a_second"] > 0 and 0 < row["first_token_p50"] <= row["turn_p50"]
    assert plot.stat().st_size > 0
    asked = [body["prompt"] for body in server.asked if body["max_tokens"] == 4]
    assert len(asked) == 15 and {body["model"] for body in server.asked} == {"played"}
    answer = [50, 51, 52, 53] if server.tells_ids else [10, 11, 12, 13]
    openings = [prompt for prompt in asked if len(prompt) <= 30]
    assert len(openings) == 5 and all(len(prompt) >= 20 for prompt in openings)
    for opening in openings:
        second, third = [each for each in asked if each[: len(opening)] == opening and each != opening]
        assert second[len(opening) : len(opening) + 4] == answer and len(second) == len(opening) + 9
        assert third[: len(second)] == second and len(third) == len(second) + 9


def test_prompts_may_be_pieces_of_texts(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(text := "It was the best of times, it was the worst of times. " * 20)
    flags = ["--text", str(tmp_path / "text"), "--tokenizer", str(models.TARGET), "--context", "9", "9", "--added", "3"]
    with pytest.raises(SystemExit):  # a warm-up's prompt is longer
        main(["bench", "agents", "--url", server.url, "--agents", "1", "--turns", "2", *flags])
    (tmp_path / "text").write_text(text * 20)
    main(["bench", "agents", "--url", server.url, "--agents", "1", "--turns", "2", "--generated", "4", *flags])
    ids = load_tokenizer(str(models.TARGET)).encode(text * 20, add_special_tokens=False)
    opening, later = [body["prompt"] for body in server.asked if body["max_tokens"] == 4]
    pieces = [ids[start : start + 9] for start in range(len(ids))]
    assert opening in pieces and later[:9] == opening and len(later) == 9 + 4 + 3
    assert later[13:] in [piece[:3] for piece in pieces]


def test_figures_are_of_later_turns() -> None:
    one = [Answered(0.0, 3.0, 4.0, 10), Answered(5.0, 5.1, 6.0, 10)]
    other = [Answered(0.0, 1.0, 4.0, 10), Answered(6.0, 6.3, 8.0, 20)]
    row = row_of([one, other])
    assert (row.agents, row.turns, row.tokens_a_second) == (2, 4, 10.0)
    assert row.first_token_p50 == pytest.approx(0.2) and row.first_token_p95 == pytest.approx(0.29)
    assert row.turn_p50 == pytest.approx(1.5) and row.opening_first_token_p50 == pytest.approx(2.0)


def test_requests_that_come_at_random_are_asked_at_each_rate(server: Server, tmp_path: Path) -> None:
    file, plot = tmp_path / "load.json", tmp_path / "load.png"
    rates, requests = (40.0, 80.0), 30
    load = load_of(rates[0], requests, seed=3, scale=256)
    server.refuses = load[4].prompt
    flags = ["--arrivals", "40", "80", "--requests", str(requests), "--scale", "256", "--seed", "3"]
    main(["bench", "agents", "--url", server.url, *flags, "--json", str(file), "--plot", str(plot)])
    rows = json.loads(file.read_text())["rows"]
    refused = sum(each.prompt == server.refuses for each in load)
    assert [(row["rate"], row["requests"], row["refused"]) for row in rows] == [(rate, 30, refused) for rate in rates]
    for row in rows:
        assert 0 < row["first_token_p50"] <= row["turn_p50"] <= row["turn_p99"]
        assert row["first_token_p50"] <= row["first_token_p99"] and row["tokens_a_second"] > 0
    asked = [(len(body["prompt"]), body["max_tokens"], body["temperature"]) for body in server.asked]
    wanted = [(each.prompt, each.answer, each.temperature) for each in load]
    assert sorted(each for each in asked if each[0] < 2900) == sorted(2 * wanted)
    assert len({tuple(body["prompt"]) for body in server.asked if len(body["prompt"]) < 2900}) == 60, "none is known"
    assert plot.stat().st_size > 0


def test_a_load_has_the_lengths_of_the_trace_and_its_rate() -> None:
    slow, fast = load_of(2.0, 20_000, seed=1), load_of(4.0, 20_000, seed=1)
    assert slow[-1].at == pytest.approx(10_000, rel=0.03) and fast[-1].at == pytest.approx(slow[-1].at / 2)
    assert [each.prompt for each in slow] == [each.prompt for each in fast]
    prompts, answers = [sorted(getattr(each, name) for each in slow) for name in ("prompt", "answer")]
    assert (prompts[0], prompts[-1]) == (2048, 65_536)
    assert prompts[10_000] == pytest.approx(6909, rel=0.05) and prompts[18_000] == pytest.approx(27_367, rel=0.05)
    assert sum(answers) / len(answers) == pytest.approx(343, rel=0.05)
    assert sum(each.temperature == 0.8 for each in slow) / len(slow) == pytest.approx(0.2, abs=0.01)


def test_a_request_that_the_server_refused_is_no_fast_one() -> None:
    row = arrivals.row_of(1.0, [Answered(0.0, 1.0, 3.0, 30), Answered(1.0, 0.0, 1.1, 0), Answered(2.0, 5.0, 9.0, 60)])
    assert (row.requests, row.refused, row.tokens_a_second) == (3, 1, 10.0)
    assert row.first_token_p50 == pytest.approx(2.0) and row.turn_p50 == pytest.approx(5.0)
    with pytest.raises(ValueError, match="refused all 1"):
        arrivals.row_of(1.0, [Answered(0.0, 0.0, 1.0, 0)])
