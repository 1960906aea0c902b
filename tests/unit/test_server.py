"""What every server of specahead answers: its health, also to those who watch it; and what it needs to start."""

import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service import service as draft_service
from specahead.config import DraftSettings, TargetSettings
from specahead.wire.server import start_server
from target_service import service as target_service


async def test_health_can_be_watched() -> None:
    server = await start_server("127.0.0.1", 0, [])
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    await server.stop(0)


@pytest.mark.parametrize(("service", "kind"), [(target_service, TargetSettings), (draft_service, DraftSettings)])
async def test_a_taken_port_is_reported_before_a_model_loads(service: Any, kind: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = kind(port=port, model="no/such/model", plan="no/such/plan.json")
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await service.run(settings, lambda server: None)


async def test_a_message_that_is_too_long_is_refused() -> None:
    server = await start_server("127.0.0.1", 0, [], most_bytes=1000)
    async with grpc.aio.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(health_pb2.HealthCheckRequest(service="x" * 1100))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(health_pb2.HealthCheckRequest(service="x" * 900))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop(0)
