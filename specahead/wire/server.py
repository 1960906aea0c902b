"""Starts the gRPC server of any process of specahead: with health, reflection, and errors as statuses."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specahead.config import ServiceSettings
from specahead.config.logs import configure_logs
from specahead.wire.access import OPEN, Guard, RequireBearer
from specahead.wire.errors import ServiceError
from specahead.wire.options import MOST_BYTES, OPTIONS

log = logging.getLogger(__name__)

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


OnReady = Callable[[RunningServer], None]


async def start_server(
    host: str,
    port: int,
    services: list[tuple[Callable[[Any, Any], None], Any, str]],
    guard: Guard = OPEN,
    most_bytes: int = MOST_BYTES,
) -> RunningServer:
    """Listen on host:port (port 0: any free one) for callers that `guard` admits.

    services: (add_…_to_server, servicer, full name) each.
    most_bytes: of a received message; longer ones are refused with RESOURCE_EXHAUSTED before they are parsed.
    Health says NOT_SERVING until set_serving(True). Raises OSError naming the address if it cannot be bound.
    """
    # The event loop and the model's thread take turns. A turn of 5 ms, the default, would delay a round by as much.
    sys.setswitchinterval(_SWITCH_SECONDS)
    options = dict(OPTIONS) | {"grpc.max_receive_message_length": most_bytes}  # of two of a name gRPC takes the first
    authorizing = [RequireBearer(guard)] if guard.authorize else []
    server = grpc.aio.server(options=list(options.items()), interceptors=authorizing)
    for add, servicer, _ in services:
        add(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = [name for _, _, name in services] + [health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    check_free(host, port)  # gRPC prints what is wrong instead of raising it
    try:
        if guard.tls is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            bound = server.add_secure_port(f"{host}:{port}", guard.tls.server_credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    await server.start()
    running = RunningServer(server, health_servicer, f"{host}:{bound}")
    await running.set_serving(False)
    return running


def check_free(host: str, port: int) -> None:
    """Raise OSError naming the address if nothing can listen on it now; checked before a model is loaded."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error


class guarded:
    """Ends a call with the status of a ServiceError that its work raises; any other error is INTERNAL and logged."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):  # nothing was raised, or the call is cancelled
            return
        if not isinstance(error, ServiceError):
            log.error("a call failed", exc_info=error)
            error = ServiceError(f"{type(error).__name__}: {error}")
        text = str(error)
        # Details travel in a header, whose room is 8 KiB.
        await self._context.abort(error.status, text if len(text) <= _MAX_DETAILS else text[:_MAX_DETAILS] + "…")


def run_service(settings: ServiceSettings, run: Callable[[OnReady], Awaitable[None]]) -> None:
    """Run a service as a process of its own: say where it listens, stop it on SIGINT or SIGTERM.

    `run` serves until it is cancelled and tells its argument when it listens. What a person can mend, such as a missing
    file or a port in use, ends the process with one line and exit status 1.
    """
    configure_logs(settings)
    try:
        uvloop.run(serve_until_signal(settings.side, run))
    except (OSError, ValueError) as error:
        log.debug("the service could not start", exc_info=error)
        sys.exit(f"error: {' '.join(str(error).split())}")


async def serve_until_signal(name: str, run: Callable[[OnReady], Awaitable[None]]) -> None:
    """The same in a running event loop, which raises what `run` raises."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(
        run(lambda server: print(f"{name} service, pid {os.getpid()}, at {server.address}", flush=True))
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
