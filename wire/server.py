"""Starting a gRPC server the way every process of specahead does: health, reflection, errors as statuses."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from wire.errors import ServiceError
from wire.malformed import RefuseMalformed

log = logging.getLogger(__name__)

# A Begin or Open carries a whole prompt: 4 bytes a token and more, beyond gRPC's default of 4 MiB.
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_MAX_DETAILS = 500
_SWITCH_SECONDS = 1e-4


@dataclass
class RunningServer:
    server: grpc.aio.Server
    health: health.aio.HealthServicer
    address: str

    async def set_serving(self, serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        await self.health.set("", kind.SERVING if serving else kind.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        await self.set_serving(False)
        await self.server.stop(grace)


async def start_server(
    host: str, port: int, services: list[tuple[Callable[[Any, Any], None], Any, str]]
) -> RunningServer:
    """Listen on host:port (0: any free one). `services`: (add_…_to_server, servicer, full name) each.

    Raises OSError naming the address if it cannot be bound. Health says NOT_SERVING until set_serving(True).
    """
    # The event loop and the model's thread take turns; a turn of the default 5 ms would hold up a round that long.
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = grpc.aio.server(options=OPTIONS, interceptors=[RefuseMalformed()])
    for add, servicer, _ in services:
        add(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = [name for _, _, name in services] + [health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    try:
        _try_bind(host, port)  # gRPC prints what is wrong instead of raising it
        bound = server.add_insecure_port(f"{host}:{port}")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(f"cannot listen on {host}:{port}: {reason}") from error
    await server.start()
    running = RunningServer(server, health_servicer, f"{host}:{bound}")
    await running.set_serving(False)
    return running


def _try_bind(host: str, port: int) -> None:
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


async def _abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    text = str(error)
    # Details travel in a header, whose room is 8 KiB.
    await context.abort(error.status, text if len(text) <= _MAX_DETAILS else text[:_MAX_DETAILS] + "…")


async def guarded(context: grpc.aio.ServicerContext, work: Awaitable[Any]) -> Any:
    """Await a unary call's work; a ServiceError becomes its status."""
    try:
        return await work
    except ServiceError as error:
        await _abort(context, error)


async def guarded_stream(context: grpc.aio.ServicerContext, work: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The same for a server stream."""
    try:
        async for item in work:
            yield item
    except ServiceError as error:
        await _abort(context, error)


async def serve_until_signal(name: str, run: Callable[[Callable[[RunningServer], None]], Awaitable[None]]) -> None:
    """Run a service process: say where it listens, stop it on SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(
        run(lambda server: print(f"{name} service, pid {os.getpid()}, at {server.address}", flush=True))
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
