"""How end-to-end tests talk to a server: requests, metrics, and waiting for a state."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protos import control_pb2, inference_pb2, inference_pb2_grpc

EXACT, APPROXIMATE = control_pb2.EXACTNESS_EXACT, control_pb2.EXACTNESS_APPROXIMATE


@dataclass
class Result:
    text: str
    tokens: list[int]
    speculation: inference_pb2.SpeculationSummary


def read_by_rounds(speculation: Any) -> float:
    """Return the share of the KV that drafted rounds read. Plain rounds, as after a late draft, read everything. The
    first round, which mostly is a plain one, comes with the prompt's pass and does not count.
    """
    rounds, plain = speculation.rounds, max(0, speculation.plain_rounds - 1)
    return float((speculation.kv_read_fraction * (rounds + plain) - plain) / rounds)


def make_request(prompt: str | Sequence[int], **fields: Any) -> inference_pb2.GenerateRequest:
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(text=prompt, **fields)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), **fields)


def generate(stub: inference_pb2_grpc.InferenceStub, prompt: str | Sequence[int], **fields: Any) -> Result:
    """Greedy unless told otherwise."""
    responses = list(stub.Generate(make_request(prompt, **({"temperature": 0} | fields))))
    tokens = [token for response in responses for token in response.token_ids]
    return Result("".join(r.text for r in responses), tokens, responses[-1].speculation)


def metric(http: str, name: str, /, **labels: str) -> float:
    """Return a sample of /metrics, 0 if it is not there."""
    with urllib.request.urlopen(f"{http}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    for line in lines:
        found = re.match(r"(\S+?)\{(.*)\} (\S+)$", line)
        if found and found[1] == f"specahead:{name}" and all(f'{k}="{v}"' in found[2] for k, v in labels.items()):
            return float(found[3])
    return 0.0


def service_state(http: str, service: str, name: str) -> float:
    return metric(http, "service_state", service=service, name=name)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def status_of(url: str) -> int:
    """Return the HTTP status that an address answers with, 0 if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for_sessions(http: str, count: int) -> None:
    """Wait until target and draft answer and hold this number of sessions; with none, until nothing is left of any."""

    def holds(service: str) -> bool:
        up = metric(http, "service_up", service=service)
        return up == 1 and service_state(http, service, "sessions") == count

    for service in ("target", "draft"):
        wait_for(lambda s=service: holds(s), 60, f"{service} holds {count} sessions")
    if count == 0:
        wait_for(lambda: metric(http, "num_requests_running") == 0, 60, "no request runs")
        wait_until_idle(http)


def wait_until_idle(http: str, seconds: float = 60, services: Sequence[str] = ("target", "draft")) -> None:
    """Wait until none of the services holds a session or a page."""
    for service in services:
        for name in ("sessions", "kv_pages_held"):
            wait_for(lambda s=service, n=name: service_state(http, s, n) == 0, seconds, f"{service} {name} 0")
