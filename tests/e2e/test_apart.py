"""Services that are started one by one, without Ray, and find each other by addresses and a token.

Proxies stand between draft and target. They delay messages as between two machines, so that both sides' messages cross,
or they repeat, delay and reorder frames. The target records the blocks that it reads.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from protos import inference_pb2
from specahead.models import PLAN
from specahead.sparsity.announce import summary_tokens
from specahead.sparsity.plan import load_plan
from tests.client import (
    APPROXIMATE,
    EXACT,
    Result,
    generate,
    make_request,
    metric,
    read_by_rounds,
    wait_for,
    wait_until_idle,
)
from tests.faulty_line import FaultyLine, faulty_line
from tests.lines import Line, lines
from tests.recording import SessionReads, load_reads
from tests.stack import Services, Stack, start_gateway, start_services

ONE_WAY = 0.02  # seconds; a round of the bundled pair takes less
TEXT = " ".join(f"It was the year {1800 + i}, and in the town nothing had changed." for i in range(60))
TARGET = ("-m", "tests.recording", "--record-reads")


@dataclass(frozen=True)
class Apart:
    """slow, faulty: the proxies between draft and target. recording: the file that the target writes when it stops."""

    services: Services
    gateway: Stack
    slow: Line
    faulty: FaultyLine
    recording: Path

    def events(self, name: str, service: str = "target") -> float:
        return metric(self.gateway.http, "service_events_total", service=service, name=name)

    def stop(self) -> None:
        self.gateway.stop()
        self.services.stop()  # by SIGTERM


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("apart")
    recording, token = folder / "reads.npz", folder / "token"
    token.write_text("a-shared-token\n")
    shown = ("--service-token-file", str(token))
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(lines())
        used: list[tuple[Line, FaultyLine]] = []

        def dial(target: str) -> str:
            faulty, address = stack.enter_context(faulty_line(target, seed=5))
            used.append((opened.to(address), faulty))
            return used[0][0].address

        services = start_services(*shown, target_command=(*TARGET, str(recording)), dial=dial)
        running = Apart(services, start_gateway(services, *shown), *used[0], recording)
        yield running
        running.stop()


def test_services_of_one_token_find_each_other(apart: Apart) -> None:
    assert generate(apart.gateway.stub(), "The old man", max_tokens=20).speculation.accepted > 0


def test_processes_listen_where_they_say_and_nowhere_else(apart: Apart) -> None:
    """The ports that test_access.py covers are all that exist, except Ray's."""
    gateway, services = apart.gateway, apart.services
    processes = [psutil.Process(process.pid) for process in (gateway.process, *services.processes)]
    addresses = [found.laddr for process in processes for found in process.net_connections() if is_open(found)]
    said = {gateway.grpc, gateway.http.removeprefix("http://"), services.target, services.draft}
    # gRPC listens on its port more than once, and on some machines through IPv6.
    assert {f"{ip.removeprefix('::ffff:')}:{port}" for ip, port in addresses} == said


def is_open(connection: Any) -> bool:
    return connection.status == psutil.CONN_LISTEN


def test_announcements_and_verdicts_that_cross_lose_nothing(apart: Apart, books: list[str], tokenizer: Any) -> None:
    """The draft codes announcements against selections whose verdict it does not know yet; the target knows them
    all."""
    prompts = [tokenizer.encode(book[5000:35_000])[:700] for book in books[:2]]
    cases = [(prompt, exactness) for exactness in (EXACT, APPROXIMATE) for prompt in prompts]

    def run(case: tuple[list[int], int]) -> Result:
        return generate(apart.gateway.stub(), case[0], max_tokens=40, ignore_eos=True, exactness=case[1])

    near = [run(case) for case in cases[:2]]
    before = {name: apart.events(name) for name in ("foreseen_rounds", "stale_frames")}
    unseen = set(before)  # counters of messages that crossed a verdict: some foresaw it, some did not
    for _ in range(5):  # timing decides which messages cross
        apart.slow.delay = ONE_WAY
        with ThreadPoolExecutor(len(cases)) as pool:
            results = list(pool.map(run, cases))
        apart.slow.delay = 0
        assert [result.tokens for result in results[:2]] == [reference.tokens for reference in near]
        for result in results[2:]:
            assert len(result.tokens) == 40
            assert result.speculation.announced_bytes > 0
            assert read_by_rounds(result.speculation) <= 0.25
        unseen = {name for name in unseen if apart.events(name) == before[name]}
        if not unseen:
            break
    assert not unseen, "no message crossed a verdict"
    assert apart.events("refused_frames") == 0, "the target knows each selection that an announcement is made against"
    assert apart.events("rejected_events") == 0
    wait_until_idle(apart.gateway.http)


def test_a_faulty_line_changes_nothing_but_counters(apart: Apart, books: list[str], tokenizer: Any) -> None:
    cases = []
    for i in range(6):
        prompt = tokenizer.encode(books[i % len(books)][3000:13_000])[: 20 + 97 * i]
        exactness = EXACT if i % 3 else APPROXIMATE
        cases.append((prompt, {"max_tokens": 60, "ignore_eos": True, "exactness": exactness}))
    stub = apart.gateway.stub()
    # A round that the proxy delayed for too long is decoded plainly, so `approximate` may differ.
    exact = [i for i, (_, fields) in enumerate(cases) if fields["exactness"] == EXACT]
    clean = [generate(stub, cases[i][0], **cases[i][1]).tokens for i in exact]
    names = [("target", "repeated_frames"), ("target", "stale_frames"), ("draft", "repeated_verdicts")]
    before = [apart.events(name, service) for service, name in names]
    apart.faulty.faulty = True
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda case: generate(stub, case[0], **case[1]), cases))
    apart.faulty.faulty = False
    assert [len(result.tokens) for result in results] == [60] * len(cases)
    assert [results[i].tokens for i in exact] == clean
    assert apart.faulty.faults > 60
    assert sum(result.speculation.accepted for result in results) > 0
    wait_until_idle(apart.gateway.http)
    for (service, name), count in zip(names, before, strict=True):
        assert apart.events(name, service) > count, name


def test_first_tokens_come_while_the_draft_is_stopped(apart: Apart, books: list[str], tokenizer: Any) -> None:
    """As soon as while it runs: that of a new session, and that of a later turn. Waiting for it would take a second."""
    texts = [tokenizer.encode(book[20_000:40_000])[:700] for book in books[:3]]
    draft, stub = apart.services.processes[1].pid, apart.gateway.stub()

    def turn(tokens: list[int]) -> tuple[list[int], float]:
        """Return the text up to its first token, and the seconds until that came."""
        began = time.monotonic()
        stream = stub.Generate(make_request(tokens, temperature=0, max_tokens=40, ignore_eos=True))
        first = list(next(stream).token_ids)
        seconds = time.monotonic() - began
        stream.cancel()
        return tokens + first, seconds

    def two_turns(number: int) -> list[float]:
        text, first = turn([number, *texts[number]])
        _, later = turn(text + texts[number][:100])
        return [first, later]

    wait_for(lambda: metric(apart.gateway.http, "service_attached", service="target") == 1, 60, "a draft is attached")
    while_it_runs = two_turns(0)
    os.kill(draft, signal.SIGSTOP)
    try:
        while_stopped = [two_turns(number) for number in (1, 2)]
    finally:
        os.kill(draft, signal.SIGCONT)
    for reference, *measured in zip(while_it_runs, *while_stopped, strict=True):
        assert min(measured) < reference + 0.8
    wait_for(lambda: metric(apart.gateway.http, "service_attached", service="target") == 1, 60, "it is attached again")
    wait_until_idle(apart.gateway.http)


def test_a_recording_agrees_with_its_sessions_summaries(apart: Apart) -> None:
    """Stopping the services makes the target write the recording."""
    stub = apart.gateway.stub()
    generate(stub, TEXT, max_tokens=8, exactness=EXACT, request_id="exact")  # not recorded
    summaries = {}
    for name in ("one", "other"):
        fields = {"exactness": APPROXIMATE, "request_id": name, "ignore_eos": True}
        summaries[name] = generate(stub, TEXT, max_tokens=40, **fields).speculation
    apart.stop()
    sessions = {session.session: session for session in load_reads(apart.recording)}
    assert list(sessions)[-2:] == ["one", "other"] and "exact" not in sessions
    for name, summary in summaries.items():
        _check(sessions[name], summary)


def _check(session: SessionReads, summary: inference_pb2.SpeculationSummary) -> None:
    reads, plan = session.reads, load_plan(PLAN)
    # The first token comes with the prompt's pass, with a round if there is a proposal by then.
    assert [read.at.round for read in reads] == list(range(1, summary.rounds + summary.plain_rounds))
    assert 0 <= summary.accepted - sum(read.accepted for read in reads) <= 4 * (1 - summary.plain_rounds)
    bases = [read.at.base for read in reads]
    grown = [after - before for before, after in itertools.pairwise(bases)]
    assert grown == [read.accepted + 1 for read in reads[:-1]]
    rows = plan.target_layers * plan.target_kv_heads
    tokens = total = 0.0
    for read in reads:
        assert read.blocks.num_heads == rows and read.blocks.matrix()[:, 0].all()  # the sinks
        tokens += read.blocks.count(0, read.blocks.num_blocks) * plan.block_size + rows * summary_tokens(
            plan, read.at.base
        )
        total += rows * read.blocks.num_blocks * plan.block_size
    assert summary.kv_read_fraction == pytest.approx(tokens / total, abs=1e-4)
