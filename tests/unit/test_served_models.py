"""Two models behind one HTTP and one gRPC gateway: each request goes to the router of the model that it names."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import aiohttp
import grpc
import pytest

from orchestrator.api.dashboard.feed import Feed
from orchestrator.api.grpc_gateway import InferenceServicer
from orchestrator.api.http_gateway import make_app
from orchestrator.api.http_requests import OPEN as OPEN_PATHS
from orchestrator.api.http_requests import guard_http
from orchestrator.api.http_server import Connections, serve_http
from orchestrator.requests.access import Proxies
from orchestrator.requests.callers import Callers
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.observer import Observer
from orchestrator.sessions.served_models import ServedModels
from protos import inference_pb2, inference_pb2_grpc
from specahead.wire.access import OPEN
from specahead.wire.server import start_server
from tests.unit.gateway import LIMITS, ScriptedRouter

NAMES = "small", "large"
ADDRESSES = {f"{name}@{model}": f"{model}:{name}" for model in NAMES for name in ("target-1", "target-2", "draft")}


class Running(NamedTuple):
    """Both endpoints, and what stands behind them by model."""

    http: aiohttp.ClientSession
    grpc: Any
    routers: dict[str, ScriptedRouter]
    models: ServedModels


@pytest.fixture
async def running(tokenizer: Any) -> AsyncIterator[Running]:
    routers, feed = {name: ScriptedRouter(tokenizer) for name in NAMES}, Feed()
    for name, router in routers.items():
        router.answer = f"This is the {name} one."
    models = ServedModels(
        [
            Frontend(
                router,  # type: ignore[arg-type]
                tokenizer,
                replace(LIMITS, model_name=name, max_context=1024 * (1 + (name == "large"))),
                Observer(Metrics(name), tokenizer, feed=feed),
                f"{name}-draft",
            )
            for name, router in routers.items()
        ]
    )

    async def read_status() -> dict[str, None]:
        return dict.fromkeys(ADDRESSES)

    callers = Callers([])
    app = guard_http(make_app(models, read_status, lambda: ADDRESSES), callers, OPEN_PATHS, models, Proxies())
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = await start_server("127.0.0.1", 0, [(add, InferenceServicer(models), "specahead.v1.Inference")], OPEN)
    async with (
        serve_http(app, "127.0.0.1", 0, Connections(100)) as address,
        aiohttp.ClientSession(address) as http,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield Running(http, inference_pb2_grpc.InferenceStub(channel), routers, models)
    await server.stop(0)


async def post(running: Running, path: str, **body: Any) -> tuple[int, Any]:
    async with running.http.post(path, json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("model", NAMES)
async def test_a_request_goes_to_the_model_that_it_names(running: Running, model: str) -> None:
    messages = [{"role": "user", "content": "Which?"}]
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": "Which?"},
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "Which?"},
    }
    for path, body in bodies.items():
        status, answer = await post(running, path, model=model, **body)
        assert status == 200 and answer["model"] == model and f"the {model} one" in str(answer)
    request = inference_pb2.GenerateRequest(text="Which?", model=model)
    texts = [response.text async for response in running.grpc.Generate(request)]
    assert "".join(texts) == f"This is the {model} one."
    assert {name: len(router.opened) for name, router in running.routers.items()} == {
        name: 4 * (name == model) for name in NAMES
    }
    tokenized = await running.grpc.Tokenize(inference_pb2.TokenizeRequest(text="Which?", model=model))
    _, same = await post(running, "/tokenize", prompt="Which?", model=model)
    assert tokenized.max_model_len == same["max_model_len"] == running.models.find(model).limits.max_context


async def test_an_unknown_model_is_not_found_in_vllms_words(running: Running) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        status, answer = await post(running, path, model="gpt", **body)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"].startswith("The model `gpt` does not exist.") and "small, large" in error["message"]
    async with running.http.get("/v1/models/gpt") as answer_:
        assert answer_.status == 404
    with pytest.raises(grpc.aio.AioRpcError, match="The model `gpt` does not exist") as refused:
        [item async for item in running.grpc.Generate(inference_pb2.GenerateRequest(text="a", model="gpt"))]
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_metrics_are_by_model_and_each_family_is_there_once(running: Running) -> None:
    await post(running, "/v1/completions", prompt="a", model="large", max_tokens=4)
    await post(running, "/v1/completions", prompt=[99999], model="large")
    async with running.http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    assert 'specahead:generation_tokens_total{model_name="large"} 4.0' in lines
    assert 'specahead:generation_tokens_total{model_name="small"} 0.0' in lines
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    (refused,) = [line for line in lines if line.startswith("specahead:request_refused_total{")]
    assert 'model_name="large"' in refused, "counted where the request was to go"
    up = [line for line in lines if line.startswith("specahead:service_up{")]
    assert len(up) == len(ADDRESSES)
    assert sum('model_name="large",service="target-2@large"' in line for line in up) == 1


async def test_a_request_is_aborted_wherever_it_runs(running: Running) -> None:
    running.routers["large"].gate.clear()
    call = running.grpc.Generate(inference_pb2.GenerateRequest(text="a", model="large", request_id="mine"))
    while not running.routers["large"].running:
        await asyncio.sleep(0.01)
    await running.grpc.Abort(inference_pb2.AbortRequest(request_id="mine"))
    assert [router.aborted for router in running.routers.values()] == [[], ["mine"]]
    call.cancel()
