"""Asking the services how they are, over a connection of its own to each."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc

from protos import control_pb2, control_pb2_grpc
from wire.access import PeerAccess
from wire.convert import status_from_pb
from wire.messages import ServiceStatus
from wire.streams import BEAT_SECONDS

AskStatus = Callable[[], Awaitable[ServiceStatus]]

_STUBS = {"target": control_pb2_grpc.TargetControlStub, "draft": control_pb2_grpc.DraftControlStub}


@contextlib.asynccontextmanager
async def services_at(addresses: Mapping[str, str], access: PeerAccess) -> AsyncIterator[dict[str, AskStatus]]:
    """Yield how each service is asked, by side; those whose address is empty are left out.

    Asking raises AioRpcError if there is no answer within BEAT_SECONDS.
    """
    async with contextlib.AsyncExitStack() as channels:
        asks: dict[str, AskStatus] = {}
        for side, address in addresses.items():
            if address:
                channel = await channels.enter_async_context(access.dial(address))
                asks[side] = partial(_ask, _STUBS[side](channel), access)
        yield asks


async def _ask(stub: Any, access: PeerAccess) -> ServiceStatus:
    request = control_pb2.StatusRequest()
    return status_from_pb(await stub.Status(request, timeout=BEAT_SECONDS, metadata=access.metadata))


async def read_statuses(asks: Mapping[str, AskStatus]) -> dict[str, ServiceStatus | None]:
    """Return what each service says of itself; None if it does not answer."""
    return {side: await _status(ask) for side, ask in asks.items()}


async def _status(ask: AskStatus) -> ServiceStatus | None:
    try:
        return await ask()
    except grpc.aio.AioRpcError:
        return None
