"""The two services as the endpoints see them: what they say of themselves, and what is wrong if they say nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from orchestrator.router import Router
from protos import control_pb2, control_pb2_grpc
from wire.access import PeerAccess
from wire.convert import status_from_pb
from wire.errors import ClusterError
from wire.messages import ServiceStatus

_ATTACH_SECONDS = 30.0
_STATUS_SECONDS = 1.0


@dataclass
class Service:
    """A running service. trouble: why it did not answer when it was last asked; refused: it does not let us in."""

    name: str
    address: str
    stub: Any
    access: PeerAccess
    trouble: str = ""
    refused: bool = False

    async def status(self) -> ServiceStatus | None:
        """Return what it says of itself; None if it does not answer."""
        request = control_pb2.StatusRequest()
        try:
            answer = await self.stub.Status(request, timeout=_STATUS_SECONDS, metadata=self.access.metadata)
        except grpc.aio.AioRpcError as error:
            self.refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
            what = "lets nobody in without its token" if self.refused else "does not answer; check that it runs there"
            self.trouble = f"the {self.name} service at {self.address} {what} ({error.details()})"
            return None
        self.trouble, self.refused = "", False
        return status_from_pb(answer)


@dataclass(frozen=True)
class Pair:
    """A target and, if its address is known, its draft."""

    services: list[Service] = field(default_factory=list)

    async def read_status(self) -> dict[str, ServiceStatus | None]:
        """Return each service's status by side; None for one that is not there or does not answer."""
        nothing: dict[str, ServiceStatus | None] = {"target": None, "draft": None}
        return nothing | {service.name: await service.status() for service in self.services}

    async def wait_until_connected(self, router: Router) -> ServiceStatus:
        """Wait until the target serves and, if there is a draft, has it, and return the target's status.

        Raises ClusterError with what is wrong.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ATTACH_SECONDS
        with_draft = len(self.services) > 1
        while True:
            statuses = await self.read_status()
            target = statuses["target"]
            if target and router.connected and (target.attached or not with_draft):
                return target
            refusals = [status.refusal for status in statuses.values() if status and status.refusal and with_draft]
            refusals += [service.trouble for service in self.services if service.refused]
            if refusals and not (target and target.attached):
                raise ClusterError(refusals[0])
            if loop.time() > deadline:
                raise ClusterError(f"not connected within {_ATTACH_SECONDS:.0f} s: {self._trouble()}")
            await asyncio.sleep(0.05)

    def _trouble(self) -> str:
        troubles = "; ".join(service.trouble for service in self.services if service.trouble)
        return troubles or f"the target at {self.services[0].address} answers, and no draft is attached to it"


@contextlib.asynccontextmanager
async def dialled(access: PeerAccess, target: str, draft: str) -> AsyncIterator[Pair]:
    """Channels to the services at these addresses (draft "": it has none that we know of), closed at the end."""
    kinds = {"target": control_pb2_grpc.TargetControlStub, "draft": control_pb2_grpc.DraftControlStub}
    addresses = {"target": target, "draft": draft}
    async with contextlib.AsyncExitStack() as started:
        services = []
        for name, address in addresses.items():
            if address:
                channel = await started.enter_async_context(access.dial(address))
                services.append(Service(name, address, kinds[name](channel), access))
        yield Pair(services)
