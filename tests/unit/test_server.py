"""What every server of specahead answers: its health, also to those who watch it."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from wire.server import start_server


async def test_health_can_be_watched() -> None:
    server = await start_server("127.0.0.1", 0, [])
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    await server.stop(0)
