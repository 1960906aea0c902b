"""Two gateways over two targets with few places; one target is killed, and the other keeps all accepted requests."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from specahead.models import PLAN, TARGET
from tests.client import generate, metric, service_state, wait_for
from tests.stack import Stack, start_service, start_stack

PLACES, QUEUED, REQUESTS, TOKENS = 2, 4, 5, 400  # of each target; of each gateway; of each request
PROMPT = "The old man looked at the sea"
SERVICE = ("-m", "target_service", "--model", str(TARGET), "--plan", str(PLAN), "--port", "0")
FLAGS = ("--draft", "none", "--kv-tokens", "40000", "--max-sessions", f"{PLACES}", "--max-queued", f"{QUEUED}")


@dataclass(frozen=True)
class Cluster:
    """Two gateways over both targets, and the process id of the second target."""

    gateways: list[Stack]
    pid: int

    def routed(self, target: str) -> float:
        return sum(metric(gateway.http, "routed_requests_total", target=target) for gateway in self.gateways)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        targets = [start_service(*SERVICE, *FLAGS) for _ in range(2)]
        for process, _ in targets:
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        addresses = ",".join(address for _, address in targets)
        gateways = []
        for _ in range(2):
            gateways.append(start_stack("--target-address", addresses, "--draft", "none"))
            stack.callback(gateways[-1].stop)
        yield Cluster(gateways, targets[1][0].pid)


def test_no_request_that_was_accepted_is_refused_when_a_target_is_killed(cluster: Cluster) -> None:
    """Six of ten requests wait. After the loss eight wait at the other target, twice as many as it takes of new
    ones."""
    stubs = [gateway.stub() for gateway in cluster.gateways]
    expected = generate(stubs[0], PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens
    with ThreadPoolExecutor(2 * REQUESTS) as pool:
        asked = [
            pool.submit(generate, stub, PROMPT, max_tokens=TOKENS, ignore_eos=True)
            for _ in range(REQUESTS)
            for stub in stubs
        ]

        def waiting() -> list[float]:
            names = ("target-1", "target-2")
            return [service_state(cluster.gateways[0].http, name, "queued_sessions") or 0 for name in names]

        wait_for(lambda: sum(waiting()) == 2 * (REQUESTS - PLACES) and waiting()[1] > 1, 30, "six wait, some at each")
        os.kill(cluster.pid, signal.SIGKILL)
        assert all(request.result(240).tokens == expected for request in asked)
    assert cluster.routed("target-1") > 2 * REQUESTS - PLACES, "the waiting requests went there, too"
