"""`evaluate tasks` and `evaluate acceptance` against a server of this process, by real HTTP."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import geometric_mean
from threading import Thread
from typing import Any

import pytest

from specahead.cli.main import main
from specahead.lab.evaluation.tasks.acceptance import divergence_of, prior_of, to_rows
from specahead.lab.evaluation.tasks.asking import Record
from specahead.models import PLAN, TARGET
from specahead.sparsity.plan import load_plan

TASKS = ["niah_single_1", "niah_multikey_2"]


class Server(ThreadingHTTPServer):
    """Finds needles; with `approximate` none of keys that are hidden among others. fails_after: answers until 500."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.fails_after = 10**6
        self.speculates = True
        self.model, self.seconds = "served", 0.0  # between two pieces of an answer that streams
        self.reading = 0.0  # seconds before the first one
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat = path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        key = re.findall(r"special magic number for (\S+) mentioned", prompt)
        found = re.findall(rf"for {re.escape(key[0])} is: (\d+)\.", prompt) if key else []
        hidden = prompt.count("One of the special magic") > 1
        text = " ".join(["It is", *found] if not (hidden and body.get("exactness") == "approximate") else ["no"])
        heat = body["temperature"] > 0
        speculation: dict[str, Any] = {
            "rounds": 10,
            "plain_rounds": 1,
            "drafted": 40,
            "accepted": 15 if heat else 30,
            "screened": 0,
        }
        speculation |= {"accepted_per_position": [6, 4, 3, 2] if heat else [9, 8, 7, 6], "confirmed": 0}
        speculation |= {"rounds_by_gamma": [1, 0, 0, 0, 10], "kv_read_fraction": 0.5}
        choice = {"message": {"content": text}} if chat else {"text": text}
        body = {"choices": [choice], "usage": {"completion_tokens": 41}}
        return body | ({"speculation": speculation} if self.speculates else {})


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(self.server.asked) >= self.server.fails_after:
            self.reply(500, {"error": {"message": "gone"}})
            return
        self.server.asked.append(body)
        if body.get("stream"):
            self.stream(body["max_tokens"])
        else:
            self.reply(200, self.server.answer(self.path, body))

    def stream(self, tokens: int) -> None:
        """Send the first two tokens, then one at a time, then the rounds."""
        self.send_response(200)
        self.end_headers()
        said = {"rounds": 4, "plain_rounds": 6, "accepted": 5, "kv_read_fraction": 0.25, "audited_tokens": 3}
        time.sleep(self.server.reading)
        choices = [[{"token_ids": [7, 8]}], *[[{"token_ids": [9]}]] * (tokens - 2), []]
        for choice in choices:
            event = {"choices": choice} | ({} if choice else {"speculation": said})
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            time.sleep(self.server.seconds)

    def reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running() -> Iterator[Server]:
    with Server() as served:
        thread = Thread(target=served.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield served
        finally:
            served.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as served:
        yield served


def arguments(command: str, server: Server, *more: str) -> list[str]:
    asked = ["--url", server.url, "--tokenizer", str(TARGET), "--contexts", "1024", "--samples", "3"]
    return ["evaluate", command, *asked, *more]


def test_scores_by_task_and_exactness(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "tasks.json", tmp_path / "tasks.png"
    main(arguments("tasks", server, "--tasks", *TASKS, "--json", str(file), "--plot", str(plot)))
    content = json.loads(file.read_text())
    scores = {(row["task"], row["exactness"]): row["score"] for row in content["rows"]}
    assert scores == {
        ("niah_single_1", "exact"): 1, ("niah_single_1", "approximate"): 1,
        ("niah_multikey_2", "exact"): 1, ("niah_multikey_2", "approximate"): 0,
        ("mean of 2", "exact"): 1, ("mean of 2", "approximate"): 0.5,
    }  # fmt: skip
    assert content["rows"][-1]["of_exact"][0] == 0.5 and content["rows"][0]["of_exact"] is None
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:4] == ["task", "exactness", "context", "samples"]
    assert (
        " ".join(out[2].split())
        == "niah_single_1 approximate 1024 3 50.0 % 100.0 % 43.8 to 100.0 100.0 % 100.0 to 100.0"
    )
    assert plot.stat().st_size > 0
    assert len(server.asked) == len(content["answers"]) == 12
    for body in server.asked:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("served", 0, 128)
    for answer in content["answers"]:
        assert 0.9 * 1024 <= answer["prompt_tokens"] + 128 <= 1024


def test_a_run_that_ended_goes_on(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tasks.json"
    command = arguments("tasks", server, "--tasks", *TASKS, "--json", str(file), "--resume", "--concurrency", "1")
    server.fails_after = 5
    with pytest.raises(SystemExit, match=r"error: .*500: .*gone"):
        main(command)
    assert len(json.loads(file.read_text())["answers"]) == 5
    server.fails_after = 10**6
    main(command)
    asked = [json.dumps(body) for body in server.asked]
    assert len(asked) == len(set(asked)) == 12
    first = capsys.readouterr().out
    main(command)
    assert len(server.asked) == 12 and capsys.readouterr().out == first
    main([*command, "--seed", "1"])
    assert len(server.asked) == 24
    file.write_text("{}")
    with pytest.raises(SystemExit, match="not the file of an earlier run"):
        main(command)


def test_chat_of_a_server_that_knows_no_exactness(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    server.speculates = False
    more = ("--tasks", TASKS[0], "--chat", "--exactness", "--json", str(file))
    main(arguments("tasks", server, *more))
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["exactness"], row["score"], row["of_exact"]) == ("", 1, None)
    assert all("exactness" not in body and body["messages"][0]["role"] == "user" for body in server.asked)


def test_a_short_text_is_asked_about_once_and_counts_in_each_context(server: Server, tmp_path: Path) -> None:
    questions, file = tmp_path / "qa.jsonl", tmp_path / "tasks.json"
    questions.write_text(json.dumps({"context": "It is so.", "input": "How is it?", "answers": ["it is"]}) + "\n")
    more = ("--tasks", TASKS[0], "--longbench", str(questions), "--contexts", "512", "1024", "--concurrency", "1")
    main(arguments("tasks", server, *more, "--exactness", "exact", "--json", str(file)))
    rows = [row for row in json.loads(file.read_text())["rows"] if row["task"] == "longbench"]
    assert [(row["context"], row["samples"], row["score"], row["kv_read"]) for row in rows] == [
        (512, 1, 1, 0.5), (1024, 1, 1, 0.5)
    ]  # fmt: skip
    assert sum("How is it?" in body["prompt"] for body in server.asked) == 1


def test_flags_that_do_not_fit(server: Server) -> None:
    for more, words in (
        (("--tasks", "nonsense"), "--tasks nonsense: expected some of niah_single_1"),
        (("--resume",), "name one"),
        (("--concurrency", "0"), "must be positive"),
        (("--tasks", "copy_code"), "the shortest prompt has"),
    ):
        with pytest.raises(SystemExit, match=words):
            main(arguments("tasks", server, *more))


def test_acceptance_by_task_and_temperature_goes_into_the_plan(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plan, text = tmp_path / "acceptance.json", tmp_path / "plan.json", tmp_path / "prose.txt"
    plan.write_text(Path(PLAN).read_text())
    text.write_text("It was a day like any other. The rain had stopped.\n" * 100)
    command = arguments("acceptance", server, "--tasks", TASKS[0], "--text", str(text), "--generated", "64")
    main([*command, "--json", str(file), "--plan", str(plan)])
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 8 and {row["task"] for row in rows} == {"niah_single_1", "continue prose.txt"}
    for row in rows:
        assert (row["answers"], row["rounds"], row["plain_rounds"], row["tokens"]) == (3, 30, 3, 123)
        assert row["accepted"] == [1.5 if row["temperature"] else 3.0] * 3
        assert row["chances"][0] == (0.6 if row["temperature"] else 0.9)
    assert {body["max_tokens"] for body in server.asked} == {64}
    before, after = load_plan(PLAN), load_plan(plan)
    # Tokens accepted over tokens judged, of rounds at both temperatures.
    chance = round((30 + 15) / (10 + 9 + 8 + 7 + 10 + 6 + 4 + 3), 4)
    assert after.acceptance == chance and after.hash == before.hash
    changed = {"acceptance": chance, "acceptance_rounds": 120}
    assert after.provenance == before.provenance | changed
    assert f"accepted with {chance:.3f}" in capsys.readouterr().out
    server.asked.clear()
    main(arguments("acceptance", server, "--tasks", "--text", str(text), "--temperatures", "0", "--generated", "8"))
    assert len(server.asked) == 6 and all("rain had stopped" in body["prompt"] for body in server.asked)
    server.asked.clear()
    chats = ("--chat", "--tasks", "tool_calls", "--text", str(text), "--temperatures", "0", "--generated", "8")
    main(arguments("acceptance", server, *chats, "--exactness", "exact"))
    forms = [("messages" in body, len(body.get("tools", ()))) for body in server.asked]
    assert sorted(forms) == [(False, 0)] * 3 + [(True, 4)] * 3  # a passage is no chat's message
    server.speculates = False
    with pytest.raises(SystemExit, match="no `speculation`"):
        main(command)


def test_servers_take_turns_and_the_first_is_compared_with_the_best_other(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compared.json"
    with running() as fast, running() as slow:
        servers = (server, fast, slow)
        server.seconds, fast.seconds, slow.seconds, slow.reading = 0.003, 0.001, 0.002, 0.04
        command = ["evaluate", "acceptance", "--tokenizer", str(TARGET), "--contexts", "512", "--url"]
        compared = [*command, *(each.url for each in servers)]
        more = ("--generated", "12", "--at-once", "1", "2", "--exactness", "approximate", "--temperatures", "0.8")
        main([*compared, "--text", "--tasks", "chat", "tool_calls", *more, "--json", str(file)])
        rows = json.loads(file.read_text())["rows"]
        assert [(row["task"], row["at_once"]) for row in rows] == [
            *(("tool_calls", 1), ("tool_calls", 2), ("chat", 1), ("chat", 2))
        ]
        for row in rows:
            first, best, worst = (each["tokens_a_second"] for each in row["servers"])
            assert worst < first < best < 1000 * row["at_once"]
            decoding = [each["decoding"] for each in row["servers"]]
            assert decoding[0] < decoding[2] < decoding[1]  # the last one reads prompts slowly
            over, low, high = row["over_best"]
            assert low <= over <= high and over == pytest.approx(first / best)
            for each in row["servers"]:
                assert (each["accepted"], each["plain_rounds"], each["kv_read"]) == (0.5, 0.6, 0.25)
                assert len(each["by_repeat"]) == 2 and each["audited_tokens"] == 2 * 3 * row["at_once"]
        asked = [sorted(json.dumps(body) for body in each.asked if body["max_tokens"] == 12) for each in servers]
        assert len(asked[0]) == 2 * 2 * (1 + 2) and asked[0] == asked[1] == asked[2]
        logs = {str(prompt) for body in asked[0] if len(prompt := json.loads(body)["prompt"]) > 200}
        assert len(logs) == 2 * (1 + 2)
        assert all('"exactness": "approximate"' in body and '"temperature": 0.8' in body for body in asked[0])
        printed = capsys.readouterr().out
        assert "1 over the best other, geometric mean: 0." in printed
        firsts = [row["servers"][0]["tokens_a_second"] for row in rows]
        assert f"tokens/s, geometric mean: {geometric_mean(firsts):.1f}, " in printed
        for wrong, words in (
            (("--plan", str(PLAN)), "name one --url"),
            (("--generated", "2"), "came in one piece"),
            (("--tasks",), "nothing to ask"),
            (("--url", server.url, "http://127.0.0.1:9"), "127.0.0.1:9/v1/models does not answer"),
        ):
            with pytest.raises(SystemExit, match=words):
                main([*compared, "--text", "--tasks", "chat", *more, *wrong])
        fast.model = "other"
        with pytest.raises(SystemExit, match=r"serves other, .* expected servers of the same model"):
            main([*compared, *more])


def record(exactness: str, **speculation: Any) -> Record:
    none: dict[str, Any] = {"rounds": 0, "plain_rounds": 5, "accepted": 0, "screened": 0, "confirmed": 0}
    none |= {"accepted_per_position": [], "rounds_by_gamma": [5], "kv_read_fraction": 1.0}
    return Record("t", 1, 0, exactness, 0.0, "", 0, (), None, 5, "", none | speculation)


def test_rounds_of_different_lengths_are_judged_where_they_reach() -> None:
    one = record("exact", rounds=4, accepted=3, accepted_per_position=[3], rounds_by_gamma=[0, 4])
    two = record("exact", rounds=2, accepted=3, accepted_per_position=[2, 1], rounds_by_gamma=[1, 0, 2])
    (row,) = to_rows([one, two])
    assert row.chances == (5 / 6, 1 / 2) and row.rounds_by_gamma == (1, 4, 2)
    assert prior_of([one, two, record("approximate", rounds=9)]) == (6 / 8, 6)


def test_without_drafted_rounds_there_is_no_prior() -> None:
    (row,) = to_rows([record("exact")])
    assert row.accepted is None and row.confirmed is None and row.chances == ()
    with pytest.raises(ValueError, match="no exact request had a round"):
        prior_of([record("exact"), record("approximate", rounds=1, accepted_per_position=[1], rounds_by_gamma=[0, 1])])


def test_the_divergence_is_that_of_audited_tokens() -> None:
    audited = {"audited_tokens": 30, "total_variation": 0.04}
    some = [record("approximate", **audited), record("approximate", audited_tokens=10, total_variation=0.08)]
    silent = [record("approximate"), record("exact", **audited)]
    assert divergence_of([*some, *silent]) == {"divergence": 0.05, "divergence_tokens": 40}
    assert divergence_of(silent) == {}
