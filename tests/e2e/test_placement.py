"""Where Ray runs the services of a launch, on a cluster of three nodes on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client import generate
from tests.conftest import RAY_ENVIRONMENT
from tests.stack import free_port, start_stack


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster whose second node has the resource `large` and whose third has `small`."""
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for resource in ("large", "small"):
        cluster.add_node(num_cpus=1, resources={resource: 1})
    yield cluster.address
    cluster.shutdown()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_services_run_on_nodes_that_have_what_they_need_and_are_reached_by_name(three_nodes: str) -> None:
    target_port, draft_port = free_port(), free_port()
    stack = start_stack(
        *("--ray-address", three_nodes, "--target-resource", "large", "--draft-resource", "small"),
        *("--target-host", "localhost", "--target-port", str(target_port), "--target-kv-tokens", "4000"),
        *("--draft-host", "localhost", "--draft-port", str(draft_port), "--max-context", "1024"),
    )
    try:
        assert (stack.target, stack.draft) == (f"localhost:{target_port}", f"localhost:{draft_port}")
        raylets = {parent_of(stack.target_pid), parent_of(stack.draft_pid)}
        assert len(raylets) == 2, "one node each"
        assert generate(stack.stub(), "The old man", max_tokens=8).speculation.rounds > 0
    finally:
        stack.stop()
