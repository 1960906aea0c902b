"""Speaking with the services about themselves, over a connection of its own to each: how they are, whom they serve."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from orchestrator.directory import Directory, side_of
from protos import control_pb2, control_pb2_grpc
from wire.access import PeerAccess
from wire.convert import status_from_pb
from wire.messages import ServiceStatus
from wire.streams import BEAT_SECONDS

AskStatus = Callable[[], Awaitable[ServiceStatus]]

_STUBS = {"target": control_pb2_grpc.TargetControlStub, "draft": control_pb2_grpc.DraftControlStub}


class ControlLine:
    """A connection to one service, made anew when the directory says that the service is somewhere else."""

    def __init__(self, name: str, directory: Directory, access: PeerAccess) -> None:
        self._name, self._directory, self._access = name, directory, access
        self._address = ""
        self._channels: list[grpc.aio.Channel] = []  # the last is in use; on the one before calls may be under way

    async def status(self) -> ServiceStatus:
        """Ask the service how it is. Raises AioRpcError if there is no answer within BEAT_SECONDS."""
        request = control_pb2.StatusRequest()
        stub = await self._stub()
        try:
            return status_from_pb(await stub.Status(request, timeout=BEAT_SECONDS, metadata=self._access.metadata))
        except grpc.aio.AioRpcError:
            self._address = ""  # the next call dials anew, with the certificates that there are then
            raise

    async def set_targets(self, addresses: Iterable[str]) -> None:
        """Tell a draft for which targets it is to draft from now on. Raises AioRpcError as `status` does."""
        request = control_pb2.Targets(addresses=addresses)
        stub = await self._stub()
        await stub.SetTargets(request, timeout=BEAT_SECONDS, metadata=self._access.metadata)

    async def _stub(self) -> Any:
        address = self._directory.addresses[self._name]
        if address != self._address:
            self._address = address
            self._channels.append(self._access.dial(address))
            if len(self._channels) > 2:
                await self._channels.pop(0).close()
        return _STUBS[side_of(self._name)](self._channels[-1])

    async def close(self) -> None:
        """Close what is open. Calls under way are cancelled."""
        for channel in self._channels:
            await channel.close()


@contextlib.asynccontextmanager
async def lines_to(directories: Iterable[Directory], access: PeerAccess) -> AsyncIterator[dict[str, ControlLine]]:
    """Yield a connection to each service there is, by name; closed at the end."""
    lines = {name: ControlLine(name, each, access) for each in directories for name in each.addresses}
    try:
        yield lines
    finally:
        await asyncio.gather(*(line.close() for line in lines.values()))


def asks_of(lines: Mapping[str, ControlLine]) -> dict[str, AskStatus]:
    """Return how each service is asked for its status, by name."""
    return {name: line.status for name, line in lines.items()}


async def read_statuses(asks: Mapping[str, AskStatus]) -> dict[str, ServiceStatus | None]:
    """Return what each service says of itself, by name; None for one that does not answer."""
    return dict(zip(asks, await asyncio.gather(*map(_status, asks.values())), strict=True))


def gauges_of_targets(services: Mapping[str, ServiceStatus | None]) -> Counter[str]:
    """Return the gauges of the targets that answer, summed over them."""
    total: Counter[str] = Counter()
    for name, status in services.items():
        if status is not None and side_of(name) == "target":
            total.update(status.gauges)  # type: ignore[arg-type]  # which may be floats
    return total


async def _status(ask: AskStatus) -> ServiceStatus | None:
    try:
        return await ask()
    except grpc.aio.AioRpcError:
        return None


async def keep_told(lines: Mapping[str, ControlLine], targets: Directory) -> None:
    """Tell the drafts among the services which targets there are, at every change and every second, until cancelled.

    Every second, since a draft that was started anew knows of none.
    """
    while True:
        await asyncio.gather(*(_tell(line, targets) for name, line in lines.items() if side_of(name) == "draft"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(targets.changed(), BEAT_SECONDS)


async def _tell(draft: ControlLine, targets: Directory) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):  # it is told again in a moment
        await draft.set_targets(targets.addresses.values())
