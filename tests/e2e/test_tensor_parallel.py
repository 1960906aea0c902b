"""A target over two ranks, which are processes of their own: its tokens, and what ends it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2
from specahead.models import TARGET
from tests.books import read_passages
from tests.client import APPROXIMATE, generate, make_request, read_by_rounds, wait_for
from tests.e2e.test_bfloat16 import run
from tests.stack import ROOT, start_gateway, start_services, start_stack

COMMAND = ("-m", "target_service", "--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    return read_passages(books, tokenizer, (20, 150, 400, 800), 5, 30_000)


def test_greedy_tokens_are_those_of_one_rank(prompts: list[list[int]]) -> None:
    """With a draft, whose proposals are rolled back where they are rejected."""
    of_two = run(start_services(target_command=COMMAND), prompts, 4)
    assert of_two == run(start_services(), prompts, 4)


def test_sparse_reading_prefixes_and_grammars(prompts: list[list[int]]) -> None:
    services = start_services(target_command=COMMAND)
    try:
        stack = start_gateway(services)
        stub, prompt = stack.stub(), prompts[-1]
        sparse = generate(stub, prompt, max_tokens=40, ignore_eos=True, exactness=APPROXIMATE)
        assert len(sparse.tokens) == 40
        assert read_by_rounds(sparse.speculation) < 0.9
        first, again = (generate(stub, prompt, max_tokens=12, ignore_eos=True).tokens for _ in range(2))
        assert again == first  # over the pages that the first one has left
        drawn = [generate(stub, prompt, max_tokens=12, temperature=0.8, seed=7).tokens for _ in range(2)]
        assert drawn[0] == drawn[1]
        wanted = inference_pb2.StructuredOutputs(regex="(yes|no), [0-9]{3}")
        ruled = generate(stub, prompt, max_tokens=20, structured_outputs=wanted)
        assert re.fullmatch("(yes|no), [0-9]{3}", ruled.text)
        stack.stop()
    finally:
        services.stop()


@pytest.fixture
def target() -> Iterator[subprocess.Popen[str]]:
    """A target service by itself, which listens."""
    flags = ("--model", str(TARGET), "--draft", "lookup", "--port", "0", "--kv-tokens", "4000")
    command = [sys.executable, *COMMAND, *flags, "--timeouts", '{"step": 3}']
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
        yield process
        process.kill()


def listening(target: subprocess.Popen[str]) -> tuple[str, int]:
    """Return where a target listens, and the process id of its rank 1."""
    assert target.stdout is not None
    found = re.search(r"at (\S+:\d+)", target.stdout.readline())
    assert found is not None
    children = Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text().split()
    (rank,) = (int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())
    return found.group(1), rank


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_killed_rank_ends_the_target(target: subprocess.Popen[str]) -> None:
    _, rank = listening(target)
    os.kill(rank, signal.SIGKILL)
    _, said = target.communicate(timeout=10)
    assert target.returncode == 71
    assert re.search(rf"CRITICAL \S+: rank 1 of the 2 .* so this process ends rank_pid={rank} status=-9\n", said)


def test_a_rank_that_hangs_ends_the_target(target: subprocess.Popen[str]) -> None:
    """As a step that hangs, within the same time; the rank ends with it."""
    address, rank = listening(target)
    os.kill(rank, signal.SIGSTOP)
    gateway = start_stack("--target-address", address, "--draft", "lookup")
    try:
        gateway.stub().Generate(make_request("Once", max_tokens=4))  # nobody waits for its answer
        _, said = target.communicate(timeout=20)
        assert target.returncode == 70
        assert "has taken more than 3 s, so it hangs" in said
        wait_for(lambda: has_ended(rank), 5, "the rank has ended")
    finally:
        gateway.stop()


def test_ranks_end_with_the_target(target: subprocess.Popen[str]) -> None:
    _, rank = listening(target)
    target.terminate()
    assert target.wait(20) == 0
    wait_for(lambda: has_ended(rank), 5, "the rank has ended")
