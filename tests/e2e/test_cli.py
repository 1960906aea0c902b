"""The commands as a user runs them: what they print, and one line and a non-zero exit for what they refuse."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from specahead.cli.main import main
from specahead.config.version import running_version
from specahead.lab.evaluation.plans import save_plan
from specahead.models import TARGET
from specahead.sparsity.plan import uniform_plan
from tests.client import generate, metric, wait_for, wait_until_idle
from tests.conftest import RAY_ENVIRONMENT
from tests.stack import ROOT, Stack

PROMPT = "The old man — naïve as he was — looked at the sea and"
SPECAHEAD = str(Path(sys.executable).with_name("specahead"))
CHAT = [sys.executable, "-m", "specahead.cli", "chat"]
LAUNCH = [sys.executable, "-m", "orchestrator.launch"]


def run(*command: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command, cwd=ROOT, input=stdin, capture_output=True, timeout=120, env=os.environ | environment
    )


def assert_refused(done: subprocess.CompletedProcess[bytes], reason: str) -> None:
    """It fails, and says why in the last line on standard error; before it there may be lines of the log."""
    *log, message = done.stderr.decode().splitlines()
    assert done.returncode == 1, message
    assert message.startswith("error: ")
    assert all(" INFO " in line for line in log), log
    assert reason in message


@pytest.mark.parametrize("source", ["--prompt-file", "-"])
def test_generate_prints_the_text(stack: Stack, tmp_path: Path, source: str) -> None:
    """The same for a prompt from a file and from standard input."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    given = {"--prompt-file": [source, str(file)], "-": [source]}[source]
    flags = ["--url", stack.http, "--max-tokens", "20", "--temperature", "0"]
    done = run(SPECAHEAD, "generate", *flags, *given, stdin=PROMPT.encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == generate(stack.stub(), PROMPT, max_tokens=20).text + "\n"
    assert done.stderr == b""


def test_generate_json(stack: Stack, tokenizer: Any) -> None:
    """One object, with all that is known of the request."""
    flags = ["--url", stack.http, "--max-tokens", "30", "--temperature", "0", "--json"]
    done = run(SPECAHEAD, "generate", *flags, "--prompt", PROMPT)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "speculation"}
    expected = generate(stack.stub(), PROMPT, max_tokens=30)
    assert (answer["text"], answer["token_ids"]) == (expected.text, expected.tokens)
    assert answer["finish_reason"] == "length"
    prompt_tokens = len(tokenizer.encode(PROMPT))
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 30, "total_tokens": prompt_tokens + 30}
    assert answer["usage"].items() >= usage.items()
    speculation = answer["speculation"]
    assert {
        "rounds", "drafted", "accepted", "accepted_per_position", "stale_rounds", "announced_bytes", "kv_read_fraction"
    } <= set(speculation)  # fmt: skip
    assert 0 < sum(speculation["accepted_per_position"]) == speculation["accepted"] <= speculation["drafted"]
    assert speculation["kv_read_fraction"] == 1


def test_generate_passes_every_flag_on(stack: Stack) -> None:
    """Sampling, stop strings and exactness do what they do over gRPC."""
    stub, long_prompt = stack.stub(), PROMPT * 40
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 2**64 - 1}
    plain = generate(stub, long_prompt, max_tokens=30, **sampling).text
    stop = plain[10:16]
    flags = ["--url", stack.http, "--max-tokens", "30", "--json", "--stop", "never there", "--stop", stop]
    flags += ["--temperature", "0.9", "--top-p", "0.95", "--seed", str(2**64 - 1)]
    answer = json.loads(run(SPECAHEAD, "generate", *flags, "--prompt", long_prompt).stdout)
    assert answer["text"] == plain[: plain.index(stop)]
    assert answer["finish_reason"] == "stop"
    flags += ["--exactness", "approximate"]
    answer = json.loads(run(SPECAHEAD, "generate", *flags, "--prompt", long_prompt).stdout)
    assert answer["speculation"]["kv_read_fraction"] < 1
    assert answer["speculation"]["announced_bytes"] > 0


def test_interrupting_generate_ends_its_request(stack: Stack) -> None:
    """Text is shown as it comes; Ctrl-C leaves nothing running."""
    flags = ["--url", stack.http, "--max-tokens", "20000", "--temperature", "1", "--prompt", PROMPT]
    # A shell's background jobs ignore SIGINT, and their children inherit that: not so here. Popen's `preexec_fn` would
    # fork, and gRPC's handlers of forks abort the child now and then.
    heeding = "import os, sys; from signal import *; signal(SIGINT, SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heeding, SPECAHEAD, "generate", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(20)
        assert metric(stack.http, "num_requests_running") == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    wait_for(lambda: metric(stack.http, "num_requests_running") == 0, 60, "the request ends")
    wait_until_idle(stack.http)


def test_generate_refuses_in_one_line(stack: Stack, tmp_path: Path) -> None:
    bad = tmp_path / "latin-1.txt"
    bad.write_bytes("naïve".encode("latin-1"))
    here = ("--url", stack.http)
    cases: list[tuple[list[str], str]] = [
        (["--url", "http://127.0.0.1:1", "--prompt", "x"], "does not answer"),
        ([*here, "--prompt", ""], "prompt is empty"),
        ([*here, "--prompt", "x", "--max-tokens", "-1"], "max_tokens"),
        ([*here, "--prompt-file", "/no/such/file"], "/no/such/file"),
        ([*here, "-"], "standard input"),
    ]
    for flags, reason in cases:
        done = run(SPECAHEAD, "generate", *flags, stdin=bad.read_bytes())
        assert_refused(done, reason)
        assert done.stdout == b""


def test_launch_refuses_a_plan_for_another_target(ray_address: str, tmp_path: Path) -> None:
    """What a service says reaches the user, without what Ray says about it."""
    plan = tmp_path / "plan.json"
    save_plan(uniform_plan(3, 2, 2, 2), plan)
    flags = ["--draft", "lookup", "--namespace", "mismatch", "--grpc-port", "0", "--port", "0"]
    done = run(*LAUNCH, "--plan", str(plan), *flags, **RAY_ENVIRONMENT, RAY_ADDRESS=ray_address)
    assert_refused(done, f"{plan} is for a ")
    assert b"ready" not in done.stdout


def test_a_launch_says_what_to_try_and_that_works(stack: Stack) -> None:
    lines = dict(line.split(": ", 1) for line in stack.output.read_text().splitlines() if ": " in line)
    done = subprocess.run(lines["try"], shell=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["finish_reason"] in ("stop", "length"), done.stderr
    assert lines["dashboard"] == f"{stack.http}/dashboard" and lines["placement"]
    assert "tokens; sessions at once: " in lines["KV room"] and "policy" in lines


def test_serve_is_the_launch(stack: Stack) -> None:
    """Settings and refusals are those of `python -m orchestrator.launch`; the port of HTTP is looked at as well."""
    dry = run(SPECAHEAD, "serve", "--dry-run", "--max-queued", "6")
    assert dry.stdout == run(*LAUNCH, "--dry-run", "--max-queued", "6").stdout
    assert json.loads(dry.stdout)["max_queued"] == 6
    port = stack.http.rsplit(":", 1)[1]
    done = run(SPECAHEAD, "serve", "--port", port, "--grpc-port", "0")
    assert_refused(done, f"cannot listen on 127.0.0.1:{port}")
    assert b"Ray" not in done.stdout


def test_chat_answers_each_line_of_a_pipe_and_remembers(stack: Stack, client: OpenAI) -> None:
    """The second answer is that to the whole conversation."""
    flags = ["--url", stack.http, "--max-tokens", "12", "--temperature", "0", "--system", "Be brief."]
    done = run(SPECAHEAD, "chat", *flags, stdin=b"The old man\n\nAnd the sea?\n")
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    expected = ""
    for line in "The old man", "And the sea?":
        messages.append({"role": "user", "content": line})
        answer = client.chat.completions.create(
            model="tiny-target", messages=messages, max_tokens=12, temperature=0
        ).choices[0].message.content  # fmt: skip
        messages.append({"role": "assistant", "content": answer})
        expected += f"{answer}\n"
    assert done.stdout.decode() == expected


def test_chat_takes_commands(stack: Stack, tmp_path: Path) -> None:
    """They are no messages; what follows them is asked as they say."""
    file = tmp_path / "chat.json"
    flags = ["--url", stack.http, "--max-tokens", "4", "--temperature", "0"]
    lines = f"The sea\n/approximate\n/new\n/help\nThe old man\n/save {file}\n/save /nope/x\n/save\n"
    done = subprocess.run([*CHAT, *flags], cwd=ROOT, input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    asked, answered = json.loads(file.read_text())
    assert asked == {"role": "user", "content": "The old man"} and answered["content"] in done.stdout
    for said in ("/exact ", f"2 messages are in {file}", "/nope/x cannot be written: No such file", "give a file"):
        assert said in done.stdout


def test_chat_at_a_terminal(stack: Stack) -> None:
    """Ctrl-C ends an answer and Ctrl-D the conversation."""
    flags = ["--url", stack.http, "--temperature", "0", "--max-tokens", "20000"]
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [SPECAHEAD, "chat", *flags], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""

    def read_until(mark: bytes) -> None:
        nonlocal shown
        shown = b""
        while mark not in shown:
            assert select.select([ours], [], [], 60)[0], f"{mark!r} did not come after {shown!r}"
            shown += os.read(ours, 4096)

    try:
        read_until(b"> ")
        os.write(ours, b"The old man\n")
        read_until(b"\n")  # the line is echoed
        read_until(b" ")
        process.send_signal(signal.SIGINT)
        read_until(b"> ")
        os.write(ours, b"x" * 3000 + b"\n")  # within a terminal's line of 4,096 characters
        read_until(b"\n")  # the line is echoed
        read_until(b" ")
        process.send_signal(signal.SIGINT)
        read_until(b"> ")
        os.write(ours, b"/new\n\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    wait_until_idle(stack.http)


def test_status_tells_of_services_sessions_and_kv(stack: Stack, client: OpenAI) -> None:
    """As a table, and as JSON while a request runs; afterwards nothing is held."""
    wait_until_idle(stack.http)
    stream = client.completions.create(model="tiny-target", prompt=PROMPT, max_tokens=20000, stream=True)
    next(iter(stream))
    status = json.loads(run(SPECAHEAD, "status", "--url", stack.http, "--json").stdout)
    stream.close()
    (model,) = status["models"]
    assert (status["ready"], model["model"], model["requests_running"]) == (True, "tiny-target", 1)
    assert status["version"] == running_version()
    for side, pid in (("target", stack.target_pid), ("draft", stack.draft_pid)):
        service = status["services"][side]
        assert (service["up"], service["sessions"], service["pid"]) == (1, 1, pid)
        assert 0 < service["kv_pages_held"] < service["kv_pages"]
    wait_until_idle(stack.http)
    table = run(SPECAHEAD, "status", "--url", stack.http)
    rows = [line.split() for line in table.stdout.decode().splitlines()]
    assert table.returncode == 0 and ["target", "connected", str(stack.target_pid), "0", "0"] in [r[:5] for r in rows]


def test_tasks_and_acceptance_are_asked_of_it(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled pair answers; its rounds are counted, and what it read is less where it may be."""
    asked = ["--url", stack.http, "--tokenizer", str(TARGET), "--contexts", "512", "--samples", "2", "--json"]
    tasks, acceptance = tmp_path / "tasks.json", tmp_path / "acceptance.json"
    main(["evaluate", "tasks", *asked, str(tasks), "--tasks", "niah_single_1"])
    rows = json.loads(tasks.read_text())["rows"]
    assert [(row["exactness"], row["samples"]) for row in rows] == [("exact", 2), ("approximate", 2)]
    only = ["--tasks", "key_value", "--text", "--generated", "24", "--temperatures", "0"]
    main(["evaluate", "acceptance", *asked, str(acceptance), *only])
    exact, approximate = json.loads(acceptance.read_text())["rows"]
    for row in (exact, approximate):
        assert (
            row["tokens"] == 48 and row["rounds"] and sum(row["rounds_by_gamma"]) == row["rounds"] + row["plain_rounds"]
        )
        assert 0 <= row["accepted"][1] <= row["accepted"][0] <= row["accepted"][2] <= 4
    assert exact["kv_read"] == 1 > approximate["kv_read"]
    assert "accepted a round" in capsys.readouterr().out
    only += ["--url", stack.http, stack.http, "--at-once", "2", "--repeats", "1", "--exactness", "approximate"]
    main(["evaluate", "acceptance", *asked, str(acceptance), *only])
    (compared,) = json.loads(acceptance.read_text())["rows"]
    for each in compared["servers"]:
        assert each["tokens_a_second"] > 0 and each["kv_read"] < 1 and 0 < each["accepted"] <= 4
    assert "1 over the best other" in capsys.readouterr().out
