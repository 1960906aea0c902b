"""Where Ray runs the services of a launch, on several nodes on this machine, and where it does when one is lost."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.client import generate, metric, service_state, wait_for
from tests.conftest import RAY_ENVIRONMENT
from tests.stack import start_stack

TOKENS = 1000
PROMPT = "The old man looked at the sea"
# Ray takes 15 s or more to give a node up otherwise.
IMPATIENT = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, Callable[[], None]]]]:
    """The address of a cluster and how its nodes are lost, raylet and all: 127.0.0.1, its head, which has the resource
    `small`, and two others, which have `large`."""
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.1", "resources": {"small": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head | {"_system_config": IMPATIENT})
    nodes = {}
    for host in ("127.0.0.2", "127.0.0.3"):
        node = cluster.add_node(num_cpus=1, node_ip_address=host, resources={"large": 1})
        nodes[host] = partial(cluster.remove_node, node, allow_graceful=False)
    yield cluster.address, nodes
    cluster.shutdown()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_target_moves_to_another_node_and_streams_go_on(cluster: tuple[str, dict[str, Callable[[], None]]]) -> None:
    """Services run on nodes that have what they need, and listen there."""
    address, lose = cluster
    stack = start_stack(
        *("--ray-address", address, "--target-resource", "large", "--draft-resource", "small"),
        *("--target-kv-tokens", "4000", "--max-context", "2048"),
    )
    try:
        host = stack.target.partition(":")[0]
        assert host in lose and stack.draft.startswith("127.0.0.1:")
        assert len({parent_of(stack.target_pid), parent_of(stack.draft_pid)}) == 2, "one raylet each"
        stub = stack.stub()
        expected = generate(stub, PROMPT, max_tokens=TOKENS, ignore_eos=True)
        assert expected.speculation.rounds > 0

        results: list[Any] = []
        ask = lambda: results.append(generate(stub, PROMPT, max_tokens=TOKENS, ignore_eos=True))  # noqa: E731
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        wait_for(lambda: metric(stack.http, "num_requests_running") == 1, 10, "the request runs")
        lose[host]()
        thread.join(60)
        assert results and results[0].tokens == expected.tokens
        assert service_state(stack.http, "target", "pid") != stack.target_pid
        wait_for(lambda: metric(stack.http, "service_attached", service="target") == 1, 10, "the draft has found it")
        assert generate(stub, PROMPT, max_tokens=20).speculation.rounds > 0
    finally:
        stack.stop()
