"""A target over two ranks, which are processes of their own: its tokens, and what ends it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from protos import inference_pb2
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.models import TARGET
from tests.books import read_passages
from tests.client import APPROXIMATE, generate, make_request, metric, read_by_rounds, wait_for
from tests.e2e.test_precision import NEW_TOKENS, ask
from tests.stack import ROOT, Services, Stack, start_gateway, start_services, start_stack
from tests.unit.steps import decode

COMMAND = ("-m", "target_service", "--tensor-parallel-size", "2")
ON_CPU = ("--device", "cpu")  # where ranks share the device


def listening(target: subprocess.Popen[str]) -> tuple[str, int]:
    """Return where a target listens, and the process id of its rank 1."""
    found = re.search(r"at (\S+:\d+)", target.stdout.readline())
    return found.group(1), rank_of(target.pid)


def rank_of(target: int) -> int:
    """Return the process id of rank 1 of a target, by the target's."""
    children = psutil.Process(target).children()
    (rank,) = (child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))
    return int(rank)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid)


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    return read_passages(books, tokenizer, (20, 150, 400, 800), 5, 30_000)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """The likeliest tokens after each prompt, by the target in one process, without a draft."""
    runner = make_runner(load_model(str(TARGET), torch.float32, "cpu"), 4096)
    return [decode(runner, prompt, NEW_TOKENS)[len(prompt) :] for prompt in prompts]


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """A target over two ranks, with more KV in host memory than on the device, and a draft service."""
    sizes = "--kv-tokens", "1000", "--max-model-len", "1280", "--max-sessions", "8", "--prefill-chunk", "128"
    services = start_services(*ON_CPU, *sizes, target_command=(*COMMAND, "--host-kv-memory", "0.2"))
    yield services
    services.stop()


@pytest.fixture(scope="module")
def gateway(services: Services) -> Iterator[Stack]:
    gateway = start_gateway(services)
    yield gateway
    gateway.stop()


def test_greedy_tokens_are_those_of_one_rank(
    gateway: Stack, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """With a draft service, whose proposals are rolled back where they are rejected."""
    tokens, accepted = ask(gateway, prompts, 4)
    assert tokens == expected and accepted > 0
    assert metric(gateway.http, "service_events_total", service="target", name="kv_offloads") > 0


def test_sparse_reading_prefixes_and_grammars(gateway: Stack, prompts: list[list[int]]) -> None:
    stub, prompt = gateway.stub(), prompts[-1]
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


def test_ranks_end_with_the_target(gateway: Stack, services: Services) -> None:
    """The target is told to end."""
    gateway.stop()
    target = services.processes[0]
    rank = rank_of(target.pid)
    target.terminate()
    assert target.wait(20) == 0
    wait_for(lambda: has_ended(rank), 5, "the rank has ended")


def check_greedy(runner: ModelRunner, prompt: list[int], found: list[int]) -> None:
    """Check that each token is the likeliest one by KV that is not rounded, up to what rounding to 8 bits decides."""
    assert len(found) == NEW_TOKENS
    (output,) = runner.forward([SequenceInput(SequenceKV(), prompt + found, "all")])
    logits = output.logits[len(prompt) - 1 : -1]
    assert float((logits.amax(1) - logits[range(len(found)), found]).max()) < 0.5


def test_a_draft_in_the_first_rank_and_a_killed_rank(launch: Callable[..., Stack], prompts: list[list[int]]) -> None:
    """With KV in 8 bits. Ray starts both ranks anew, and streams resume on them."""
    flags = "--placement", "together", "--kv-tokens", "4000", "--kv-cache-dtype", "fp8"
    stack = launch(*ON_CPU, "--tensor-parallel-size", "2", *flags)
    runner = make_runner(load_model(str(TARGET), torch.float32, "cpu"), 8192)
    found, accepted = ask(stack, prompts, 4)
    for prompt, answer in zip(prompts, found, strict=True):
        check_greedy(runner, prompt, answer)
    assert accepted > 0
    rank, tokens = rank_of(stack.target_pid), list[int]()
    request = make_request(prompts[-1], temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for response in stack.stub().Generate(request):
        if not tokens:
            os.kill(rank, signal.SIGKILL)
        tokens += response.token_ids
    check_greedy(runner, prompts[-1], tokens)
    assert stack.stop() == 0
    wait_for(lambda: has_ended(rank), 5, "the rank has ended")


@pytest.fixture
def target() -> Iterator[subprocess.Popen[str]]:
    """A target service by itself, which listens."""
    flags = (*ON_CPU, "--model", str(TARGET), "--draft", "lookup", "--port", "0", "--kv-tokens", "4000")
    command = [sys.executable, *COMMAND, *flags, "--timeouts", '{"step": 3}']
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
        yield process
        process.kill()


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
        answer = gateway.stub().Generate(make_request("Once", max_tokens=4))
        _, said = target.communicate(timeout=20)
        assert target.returncode == 70
        answer.cancel()
        assert "has taken more than 3 s, so it hangs" in said
        wait_for(lambda: has_ended(rank), 5, "the rank has ended")
    finally:
        gateway.stop()
