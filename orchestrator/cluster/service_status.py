"""Asks services for their status, and sends drafts the list of targets."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from orchestrator.cluster.directory import Directory, side_of
from protos import control_pb2, control_pb2_grpc
from specahead.wire.access import PeerAccess
from specahead.wire.convert import status_from_pb
from specahead.wire.messages import ServiceStatus
from specahead.wire.streams import BEAT_SECONDS

log = logging.getLogger(__name__)

# The status of each service, by name; None for one that does not answer.
Statuses = Mapping[str, ServiceStatus | None]
StatusReader = Callable[[], Awaitable[Statuses]]
_STUBS = {"target": control_pb2_grpc.TargetControlStub, "draft": control_pb2_grpc.DraftControlStub}


class ControlLine:
    """Calls one service at the address in its directory.

    Each call opens a channel of its own with the current certificates. There is one call a second, so no channel is
    kept open.
    """

    def __init__(self, name: str, directory: Directory, access: PeerAccess) -> None:
        self._name, self._directory, self._access = name, directory, access

    async def status(self) -> ServiceStatus:
        """Ask the service how it is. Raises AioRpcError if there is no answer within BEAT_SECONDS."""
        return status_from_pb(await self._call("Status", control_pb2.StatusRequest()))

    async def set_targets(self, addresses: Iterable[str]) -> None:
        """Tell a draft for which targets it is to draft from now on. Raises AioRpcError as `status` does."""
        await self._call("SetTargets", control_pb2.Targets(addresses=addresses))

    async def drain(self, draining: bool) -> None:
        """Tell a target whether sessions may still be opened on it. Raises AioRpcError as `status` does."""
        await self._call("Drain", control_pb2.DrainRequest(draining=draining))

    async def _call(self, method: str, request: Any) -> Any:
        address = self._directory.addresses.get(self._name)
        if address is None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, f"{self._name} was taken away")
        async with self._access.dial(address) as channel:
            stub = _STUBS[side_of(self._name)](channel)
            return await getattr(stub, method)(request, timeout=BEAT_SECONDS, metadata=self._access.metadata)


@dataclass(frozen=True)
class Lines(Mapping[str, ControlLine]):
    """How to call each service that the directories have at the moment, by name."""

    directories: Collection[Directory]
    access: PeerAccess

    def __getitem__(self, name: str) -> ControlLine:
        directory = next((each for each in self.directories if name in each.addresses), None)
        if directory is None:
            raise KeyError(name)
        return ControlLine(name, directory, self.access)

    def __iter__(self) -> Iterator[str]:
        for directory in self.directories:
            yield from directory.addresses

    def __len__(self) -> int:
        return sum(len(directory.addresses) for directory in self.directories)


async def read_statuses(lines: Mapping[str, ControlLine]) -> dict[str, ServiceStatus | None]:
    """Return the status of each service, by name; None for one that does not answer."""
    asked = dict(lines)  # services may come and go meanwhile
    return dict(zip(asked, await asyncio.gather(*map(_status, asked.values())), strict=True))


def gauges_of_targets(services: Statuses) -> Counter[str]:
    """Return the gauges of the targets that answer, summed over them."""
    total: Counter[str] = Counter()
    for name, status in services.items():
        if status is not None and side_of(name) == "target":
            total.update(status.gauges)  # type: ignore[arg-type]  # which may be floats
    return total


async def _status(line: ControlLine) -> ServiceStatus | None:
    try:
        return await line.status()
    except grpc.aio.AioRpcError:
        return None


async def keep_drafts_informed(lines: Mapping[str, ControlLine], targets: Directory) -> None:
    """Send drafts the list of targets at every change and every second, until cancelled.

    Every second, because a restarted draft knows no target.
    """
    while True:
        await asyncio.gather(*(_tell(line, targets) for name, line in lines.items() if side_of(name) == "draft"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await targets.changed()


async def _tell(draft: ControlLine, targets: Directory) -> None:
    try:
        await draft.set_targets(targets.addresses.values())
    except grpc.aio.AioRpcError:
        pass  # the next beat tries again
    except Exception:
        log.exception("a draft did not take its list of targets; the next beat tries again")
