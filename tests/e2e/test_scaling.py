"""A Ray whose autoscaler adds and removes nodes: targets come and go by load, and no stream ends with one.

Beside the launch that places the services runs a gateway that has joined them; the test kills it in the end.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.client import generate, make_request, metric, service_state, wait_for
from tests.conftest import RAY_ENVIRONMENT
from tests.stack import free_port, start_stack

TOKENS = 1000
PATIENCE = 180  # seconds; a quiet machine takes ten at most
PROMPT = "The old man looked at the sea"
_HEAD = "f" * 51 + "00000"  # the node id that Ray's fake provider of nodes has for the head


def autoscaling(port: int) -> dict[str, Any]:
    """Return the configuration of Ray's autoscaler. Nodes are processes here and claim a GPU, so that each runs a
    target."""
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": f"127.0.0.1:{port}",
        "head_node_id": _HEAD,
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    head = {"resources": {"CPU": 4, "GPU": 2, "small": 1}, "node_config": {}, "max_workers": 0}
    worker = {"resources": {"CPU": 1, "GPU": 1, "large": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
    commands = ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    return {
        "cluster_name": "test",
        "max_workers": 2,
        "idle_timeout_minutes": 0.15,
        "upscaling_speed": 100,
        "provider": provider,
        "available_node_types": {
            "ray.head.default": head,
            "worker": worker,
        },  # the provider knows the first by its name
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
    } | {name: [] for name in lists + commands}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a Ray that has no node for a target yet."""
    port = free_port()
    config, folder = tmp_path / "autoscaling.json", f"/tmp/ray-{port}"
    config.write_text(json.dumps(autoscaling(port)))
    variables = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1"}
    identity = {"RAY_CLOUD_INSTANCE_ID": _HEAD, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD}
    flags = ["--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", "--num-gpus=2"]
    flags += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    flags += ['--resources={"small": 1}', f"--autoscaling-config={config}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags]
    environment = os.environ | RAY_ENVIRONMENT | variables | identity
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"127.0.0.1:{port}"
    try:
        wait_for(lambda: listens(port) or head.poll() is not None, 60, "Ray listens")
        assert head.poll() is None
        yield address
    finally:
        head.terminate()
        head.wait(30)
        for process in psutil.process_iter(["cmdline"]):  # processes that its nodes leave behind
            if any(folder in part or address in part for part in process.info["cmdline"] or []):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_targets_come_and_go_by_load_and_no_stream_ends(cluster: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("both-know-it")
    environment = RAY_ENVIRONMENT | {"SPECAHEAD_SERVICE_TOKEN_FILE": str(token)}
    keeper = start_stack(
        *("--ray-address", cluster, "--node-resources", '{"target": "large", "draft": "small"}'),
        *("--autoscaling", '{"max_targets": 2, "kv_use": 0.4, "out_delay": 0.5, "in_delay": 2}'),
        *("--kv-tokens", "4000", "--max-model-len", "2048", "--max-sessions", "8"),
        environment=environment,
    )
    flags = ("--ray-address", cluster, "--join", "--kv-tokens", "4000", "--max-model-len", "2048")
    joined = start_stack(*flags, environment=environment)
    try:
        stub, other = keeper.stub(), joined.stub()
        expected = generate(stub, PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens
        results: list[list[int]] = []
        done = threading.Event()

        def ask(each: Any) -> None:
            while not done.is_set():
                results.append(generate(each, PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens)

        threads = [threading.Thread(target=ask, args=(each,), daemon=True) for each in (stub, other) for _ in range(3)]
        for thread in threads:
            thread.start()
        runs = lambda name: service_state(keeper.http, name, "sessions") > 0  # noqa: E731
        wait_for(lambda: runs("target-1") and runs("target-2"), PATIENCE, "a second target takes part of the load")
        wait_for(
            lambda: metric(joined.http, "routed_requests_total", target="target-2") > 0, PATIENCE, "the other finds it"
        )
        done.set()
        wait_for(lambda: not metric(keeper.http, "target_serving", target="target-2"), PATIENCE, "it drains")
        for thread in threads:
            thread.join(PATIENCE)
        assert len(results) >= 6 and all(tokens == expected for tokens in results), "no stream has ended"
        gone = lambda http: not metric(http, "service_up", service="target-2")  # noqa: E731
        wait_for(lambda: gone(keeper.http) and gone(joined.http), PATIENCE, "it is ended")
        wait_for_nodes(cluster, 2)

        request = make_request(PROMPT, max_tokens=TOKENS, temperature=1.0, ignore_eos=True, request_id="mine")
        got: list[int] = []
        with contextlib.suppress(grpc.RpcError):
            for response in other.Generate(request):
                got += response.token_ids
                if len(got) > 50 and joined.process.poll() is None:
                    joined.process.kill()
        assert len(got) < TOKENS
        time.sleep(0.1)
        again = [token for response in stub.Generate(request) for token in response.token_ids]
        assert len(again) == TOKENS and again[: len(got)] == got, "sampled without a seed, and the same"
    finally:
        joined.stop()
        keeper.stop()


def wait_for_nodes(address: str, count: int) -> None:
    """Wait until a Ray has this number of nodes, its head included. Ray's driver needs a process of its own."""
    code = f"""
import ray, time
ray.init('{address}', log_to_driver=False)
while sum(node['Alive'] for node in ray.nodes()) != {count}:
    time.sleep(0.5)
"""
    command, environment = [sys.executable, "-c", code], os.environ | RAY_ENVIRONMENT
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=PATIENCE)
