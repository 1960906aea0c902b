"""Where Ray runs the services of a launch, on several nodes on this machine, and what happens when one is lost."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client import generate, metric, service_state, wait_for
from tests.conftest import RAY_ENVIRONMENT
from tests.stack import ROOT, start_stack

TOKENS = 1000
PROMPT = "The old man looked at the sea"
# Ray takes 15 s or more to give a node up otherwise.
IMPATIENT = {"health_check_period_ms": 500, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray whose head has address 127.0.0.1 and the resource `small`. It believes to have a GPU, as all its nodes do,
    so that each runs one service."""
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "num_gpus": 1, "node_ip_address": "127.0.0.1", "resources": {"small": 1}}
    options = {"include_dashboard": False, "_system_config": IMPATIENT}
    cluster = Cluster(initialize_head=True, head_node_args=head | options)
    yield cluster
    cluster.shutdown()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_streams_go_on_when_a_node_is_lost_and_its_target_starts_on_one_that_joins(cluster: Any) -> None:
    """Services run on nodes that have what they need, and listen there. A node is lost with raylet and all."""

    def add_node(host: str) -> Any:
        return cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address=host, resources={"large": 1})

    nodes = {host: add_node(host) for host in ("127.0.0.2", "127.0.0.3")}
    stack = start_stack(
        *("--ray-address", cluster.address, "--targets", "2"),
        *("--target-resource", "large", "--draft-resource", "small"),
        *("--target-kv-tokens", "4000", "--max-context", "2048"),
    )
    try:
        hosts = {name: address.partition(":")[0] for name, (address, _) in stack.services.items()}
        assert hosts["draft"] == "127.0.0.1" and {hosts["target-1"], hosts["target-2"]} == set(nodes)
        assert len({parent_of(pid) for _, pid in stack.services.values()}) == 3, "a raylet each"
        stub = stack.stub()
        expected = generate(stub, PROMPT, max_tokens=TOKENS, ignore_eos=True)
        assert expected.speculation.rounds > 0

        results: list[Any] = []
        ask = lambda: results.append(generate(stub, PROMPT, max_tokens=TOKENS, ignore_eos=True))  # noqa: E731
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        runs = lambda name: service_state(stack.http, name, "sessions") == 1  # noqa: E731
        wait_for(lambda: runs("target-1") or runs("target-2"), 10, "the request runs")
        lost = "target-1" if runs("target-1") else "target-2"
        cluster.remove_node(nodes[hosts[lost]], allow_graceful=False)
        thread.join(60)
        assert results and results[0].tokens == expected.tokens

        add_node("127.0.0.4")
        wait_for(lambda: metric(stack.http, "service_attached", service=lost) == 1, 60, "it starts, and has the draft")
        command = [sys.executable, "-m", "cli", "status", "--url", stack.http, "--json"]
        status = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        assert status["nodes"]["127.0.0.4"] == [lost] and hosts[lost] not in status["nodes"]
    finally:
        stack.stop()
