"""A small synchronous gRPC client, as the command line and the demo use it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from protos import inference_pb2, inference_pb2_grpc
from wire.messages import FinishReason
from wire.server import OPTIONS


@dataclass
class Speculation:
    """How the rounds of a request went; seconds are sums over its rounds."""

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    stale_rounds: int = 0
    announced_bytes: int = 0
    kv_read_fraction: float = 1.0
    kv_fetched_fraction: float = 0.0  # of what was read
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass
class Generation:
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    speculation: Speculation


def generate(
    address: str,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: list[str] | None = None,
    exactness: str = "exact",
    sparsity: str = "",
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Run one request to its end; `on_text` gets each piece as it is committed. Raises grpc.RpcError."""
    request = inference_pb2.GenerateRequest(
        text=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop or [],
        exactness=f"EXACTNESS_{exactness.upper()}",
        sparsity=sparsity,
    )
    result = Generation("", [], 0, "", Speculation())
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            result.text += response.text
            result.token_ids += response.token_ids
            if on_text is not None:
                on_text(response.text)
            if response.finish_reason:
                result.prompt_tokens = response.usage.prompt_tokens
                result.finish_reason = FinishReason(response.finish_reason).name.lower()
                result.speculation = _summary(response.speculation)
    return result


def _summary(pb: inference_pb2.SpeculationSummary) -> Speculation:
    values = {descriptor.name: getattr(pb, descriptor.name) for descriptor in pb.DESCRIPTOR.fields}
    values["accepted_per_position"] = list(pb.accepted_per_position)
    return Speculation(**values)
