"""The gRPC gateway over a target whose text the test writes: the fields that both gateways have alike."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from orchestrator.api.grpc_gateway import InferenceServicer
from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.requests.requests import CompletionRequest
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.observer import Observer
from orchestrator.text.structured_outputs import StructuredOutputs
from protos import inference_pb2, inference_pb2_grpc
from specahead.wire.access import OPEN, Guard
from specahead.wire.server import start_server
from tests.client import make_request
from tests.unit.gateway import LIMITS, MODEL, ScriptedRouter
from tests.unit.until import until


@pytest.fixture
def router(tokenizer: Any) -> ScriptedRouter:
    return ScriptedRouter(tokenizer)


@pytest.fixture
async def stub(router: ScriptedRouter) -> AsyncIterator[Any]:
    async with running(router, OPEN) as stub:
        yield stub


@contextlib.asynccontextmanager
async def running(router: Any, guard: Guard) -> AsyncIterator[Any]:
    frontend = Frontend(router, router.tokenizer, LIMITS, Observer(Metrics(MODEL), router.tokenizer), "tiny-draft")
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = await start_server(
        "127.0.0.1", 0, [(add, InferenceServicer(frontend, None), "specahead.v1.Inference")], guard
    )
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    await server.stop(0)


async def _gather(call: Any) -> list[Any]:
    return [response async for response in call]


async def test_a_keys_limits_hold_as_over_http(router: ScriptedRouter) -> None:
    """One request at once: the second is refused while the first runs, and taken after it."""
    router.gate.clear()
    metadata = (("authorization", "Bearer k"),)
    async with running(router, Guard(Callers([Key("alice", digest_of("k"), requests=1)]).admit)) as stub:
        first = stub.Generate(make_request("The sea", max_tokens=4), metadata=metadata)
        reading = asyncio.create_task(_gather(first))
        await until(lambda: router.running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(make_request("The sea"), metadata=metadata).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests at once" in (refused.value.details() or "")
        router.gate.set()
        assert await reading
        assert await _gather(stub.Generate(make_request("The sea", max_tokens=4), metadata=metadata))
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await stub.Generate(make_request("The sea")).read()
        assert stranger.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_request_is_aborted_with_its_own_key_alone(router: ScriptedRouter) -> None:
    router.gate.clear()
    keys = Callers([Key("alice", digest_of("a")), Key("bob", digest_of("b"))])
    alice, bob = ((("authorization", f"Bearer {key}"),) for key in "ab")
    async with running(router, Guard(keys.admit)) as stub:
        call = stub.Generate(make_request("The sea", n=2, request_id="hers"), metadata=alice)
        reading = asyncio.create_task(call.read())
        await until(lambda: router.running == 2)
        for request_id in "hers", "hers-0":
            with pytest.raises(grpc.aio.AioRpcError, match="no request 'hers") as refused:
                await stub.Abort(inference_pb2.AbortRequest(request_id=request_id), metadata=bob)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert router.aborted == []
        await stub.Abort(inference_pb2.AbortRequest(request_id="hers"), metadata=alice)
        assert router.aborted == ["hers-0", "hers-1"]
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_choices_are_told_apart(stub: Any, router: ScriptedRouter) -> None:
    router.answer = ["The sea was calm.", "The old man slept."]
    texts, usage = ["", ""], {}
    async for response in stub.Generate(make_request("The sea", max_tokens=50, n=2, seed=7, request_id="both")):
        assert response.request_id == "both"
        texts[response.choice] += response.text
        if response.finish_reason:
            usage[response.choice] = response.usage
    assert texts == router.answer
    assert [record.asked.sampling.seed for record in router.opened] == [7, 8]
    assert [usage[i].completion_tokens for i in (0, 1)] == [len(record.generated) for record in router.opened]
    assert usage[0].cached_tokens == 3


def test_a_request_has_the_fields_of_http() -> None:
    """Only those of HTTP's form are missing: of streams, of what gRPC always tells, and OpenAI's name."""
    theirs = set(CompletionRequest.model_fields)
    form = {"response_format", "prompt", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids"}
    form |= {"return_speculation"}
    names = set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert names - {"text", "token_ids"} == theirs - form
    outputs = set(inference_pb2.StructuredOutputs.DESCRIPTOR.fields_by_name)
    assert outputs == {field.alias or name for name, field in StructuredOutputs.model_fields.items()} - {
        "disable_fallback"
    }


async def test_an_abort_ends_all_choices_and_no_request_whose_id_goes_on_with_a_number(
    stub: Any, router: ScriptedRouter
) -> None:
    router.gate.clear()
    asked = [make_request("The sea", request_id="job", n=2), make_request("The sea", request_id="job-7")]
    calls = [stub.Generate(request) for request in asked]
    await until(lambda: router.running == 3)
    await stub.Abort(inference_pb2.AbortRequest(request_id="job"))
    assert router.aborted == ["job-0", "job-1"]
    await stub.Abort(inference_pb2.AbortRequest(request_id="job-7"))
    assert router.aborted == ["job-0", "job-1", "job-7"]
    for call in calls:
        call.cancel()


@pytest.mark.parametrize(("fields", "reason"), [({"n": 0}, "n: "), ({"temperature": 3.0}, "temperature: ")])
async def test_fields_are_checked_as_over_http(stub: Any, fields: Any, reason: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Generate(make_request("The sea", **fields)).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(reason)
