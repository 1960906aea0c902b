"""A small synchronous gRPC client, for the command line and the demo."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protos import control_pb2, inference_pb2, inference_pb2_grpc
from specahead.wire.access import open_channel
from specahead.wire.tls import Tls


@dataclass
class Generation:
    """The answer to a request."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    speculation: dict[str, Any]
    """The fields of SpeculationSummary in the .proto, by name."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV the target had before."""


def generate(
    address: str,
    prompt: str,
    *,
    model: str = "",
    api_key: str = "",
    tls: Tls | None = None,
    max_tokens: int,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: list[str] | None = None,
    exactness: str = "exact",
    sparsity: str = "",
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Run a request to its end and return its answer. Raises grpc.RpcError.

    on_text: called with each piece of text when it is committed.
    """
    request = inference_pb2.GenerateRequest(
        text=prompt,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop or [],
        exactness=f"EXACTNESS_{exactness.upper()}",
        sparsity=sparsity,
    )
    result = Generation("", [], 0, "", {})
    with open_channel(address, tls) as channel:
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata):
            result.text += response.text
            result.token_ids += response.token_ids
            if on_text is not None:
                on_text(response.text)
            if response.finish_reason:
                reason = control_pb2.FinishReason.Name(response.finish_reason)
                result.prompt_tokens = response.usage.prompt_tokens
                result.cached_tokens = response.usage.cached_tokens
                result.finish_reason = reason.removeprefix("FINISH_REASON_").lower()
                summary = response.speculation
                values = {field.name: getattr(summary, field.name) for field in summary.DESCRIPTOR.fields}
                lists = "accepted_per_position", "rounds_by_gamma"
                result.speculation = values | {name: list(values[name]) for name in lists}
    return result
