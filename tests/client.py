"""What end-to-end tests say to a server, and what they read back."""

import re
import time
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
    """Share of the KV that rounds with drafted tokens read. Others, as when a draft is late, read everything."""
    rounds, plain = speculation.rounds, speculation.plain_rounds
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
    """A sample of /metrics; 0 if it is not there."""
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


def wait_until_idle(http: str, seconds: float = 60, services: Sequence[str] = ("target", "draft")) -> None:
    """No session and no page held on any of the services."""
    for service in services:
        for name in ("sessions", "kv_pages_held"):
            wait_for(lambda s=service, n=name: service_state(http, s, n) == 0, seconds, f"{service} {name} 0")
