"""A launch on a Ray of several nodes on this machine: where its services run, and the loss of a node or the head."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.client import generate, metric, service_state, wait_for
from tests.conftest import RAY_ENVIRONMENT
from tests.stack import ROOT, Stack, start_stack

TOKENS = 500
PROMPT = "The old man looked at the sea"
# With its own settings Ray takes 15 s or more to give up a node.
IMPATIENT = {"health_check_period_ms": 500, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
DRIVER = "127.0.0.5"  # the node of the launch that outlives the head


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray whose head has the address 127.0.0.1 and the resource `small`. All nodes but the driver's claim one GPU, so
    that each runs one service."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "num_gpus": 1, "node_ip_address": "127.0.0.1", "resources": {"small": 1}}
        options = {"include_dashboard": False, "_system_config": IMPATIENT}
        cluster = Cluster(initialize_head=True, head_node_args=head | options)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> dict[str, Any]:
    """Two nodes for targets, by address."""
    return {host: add_target_node(cluster, host) for host in ("127.0.0.2", "127.0.0.3")}


@contextlib.contextmanager
def launched_at(host: str, cluster: Any) -> Iterator[Stack]:
    """Yield a launch whose driver runs on this node."""
    stack = start_stack(
        *("--ray-address", cluster.address, "--targets", "2"),
        *("--node-resources", '{"target": "large", "draft": "small"}'),
        *("--kv-tokens", "4000", "--max-model-len", "2048"),
        command=("-m", "tests.launch_at_node", host),
    )
    try:
        yield stack
    finally:
        stack.stop()


def add_node(cluster: Any, host: str, attempts: int = 3, **options: Any) -> Any:
    """Add a node. A raylet sometimes fails to register within the 30 s that Ray gives it; then another one is tried."""
    try:
        return cluster.add_node(num_cpus=1, node_ip_address=host, **options)
    except Exception as error:  # Ray raises no narrower class
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        return add_node(cluster, host, attempts - 1, **options)


def add_target_node(cluster: Any, host: str) -> Any:
    return add_node(cluster, host, num_gpus=1, resources={"large": 1})


def ask(stack: Stack, tokens: int = TOKENS) -> Any:
    return generate(stack.stub(), PROMPT, max_tokens=tokens, ignore_eos=True)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def running_target(stack: Stack) -> str:
    """Wait until a request runs, and return the name of its target."""
    runs = lambda name: service_state(stack.http, name, "sessions") == 1  # noqa: E731
    wait_for(lambda: runs("target-1") or runs("target-2"), 60, "the request runs")
    return "target-1" if runs("target-1") else "target-2"


@pytest.mark.long
def test_streams_go_on_when_a_node_is_lost_and_its_target_starts_on_one_that_joins(
    cluster: Any, nodes: dict[str, Any]
) -> None:
    """Services run on nodes that have their resources, and listen there. Then a node is lost with its raylet."""
    with launched_at("127.0.0.1", cluster) as stack:
        hosts = {name: address.partition(":")[0] for name, (address, _) in stack.services.items()}
        assert hosts["draft"] == "127.0.0.1" and {hosts["target-1"], hosts["target-2"]} == set(nodes)
        assert len({parent_of(pid) for _, pid in stack.services.values()}) == 3, "a raylet each"
        expected = ask(stack)
        assert expected.speculation.rounds > 0

        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, stack)
            lost = running_target(stack)
            cluster.remove_node(nodes[hosts[lost]], allow_graceful=False)
            assert not answer.done(), "the request was served before anything was lost"
            assert answer.result(120).tokens == expected.tokens

        add_target_node(cluster, "127.0.0.4")
        wait_for(lambda: metric(stack.http, "service_attached", service=lost) == 1, 120, "it starts, and has the draft")
        command = [sys.executable, "-m", "specahead.cli", "status", "--url", stack.http, "--json"]
        status = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        assert status["nodes"]["127.0.0.4"] == [lost] and hosts[lost] not in status["nodes"]


@pytest.mark.long
def test_streams_go_on_when_the_head_is_lost_and_the_launch_ends_with_an_error(
    cluster: Any, nodes: dict[str, Any]
) -> None:
    """The draft dies with the head; targets and driver are on other nodes, and no new head comes.

    The launch continues for a minute, in which even a busy machine can serve the few tokens that are asked for.
    """
    add_node(cluster, DRIVER)
    with launched_at(DRIVER, cluster) as stack:
        expected = ask(stack, 300)
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, stack, 300)
            running_target(stack)
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            assert not answer.done(), "the request was served before anything was lost"
            assert answer.result(120).tokens == expected.tokens
        assert ask(stack, 50).tokens == expected.tokens[:50], "requests are taken as well"
        wait_for(lambda: "Ray is lost: its head does not answer" in stack.output.read_text(), 60, "the launch says so")
        assert stack.process.wait(120) == 1
        assert "attempt 3 of 3 to place the services anew failed: no Ray answers" in stack.output.read_text()
