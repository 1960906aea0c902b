"""Waiting at the start until target and draft have found each other, and saying what is wrong if they do not."""

import asyncio
import math
from collections.abc import Mapping

import grpc

from orchestrator.router import Router
from orchestrator.service_status import AskStatus
from wire.errors import ClusterError
from wire.messages import ServiceStatus


async def wait_until_connected(
    router: Router, services: Mapping[str, AskStatus], addresses: Mapping[str, str], seconds: float
) -> ServiceStatus:
    """Wait until the target serves and, if there is a draft, has it, and return the target's status.

    services: how each is asked for its status, by side. addresses: where they are, for what is said. seconds: how long
    to wait; 0: as long as it takes. Raises ClusterError with what is wrong.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (seconds or math.inf)
    while True:
        statuses: dict[str, ServiceStatus] = {}
        troubles: dict[str, grpc.aio.AioRpcError] = {}
        for side, ask in services.items():
            try:
                statuses[side] = await ask()
            except grpc.aio.AioRpcError as error:
                troubles[side] = error
        target = statuses.get("target")
        if target and router.connected and (target.attached or "draft" not in services):
            return target
        words = [_in_words(side, addresses[side], error) for side, error in troubles.items()]
        refusals = [status.refusal for status in statuses.values() if status.refusal and "draft" in services]
        if any(error.code() is grpc.StatusCode.UNAUTHENTICATED for error in troubles.values()):
            refusals += words
        if refusals and not (target and target.attached):
            raise ClusterError(refusals[0])
        if loop.time() > deadline:
            alone = f"the target at {addresses['target']} answers, and no draft is attached to it"
            raise ClusterError(f"not connected within {seconds:g} s: {'; '.join(words) or alone}")
        await asyncio.sleep(0.05)


def _in_words(side: str, address: str, error: grpc.aio.AioRpcError) -> str:
    refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
    what = "lets nobody in without its token" if refused else "does not answer; check that it runs there"
    return f"the {side} service at {address} {what} ({error.details()})"
