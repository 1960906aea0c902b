"""Waiting at the start until target and draft have found each other, with an error that names the cause if not."""

import asyncio
import math
from collections.abc import Callable, Mapping

import grpc

from orchestrator.cluster.directory import side_of
from orchestrator.cluster.service_status import ControlLine
from orchestrator.sessions.router import Router
from specahead.wire.errors import ClusterError
from specahead.wire.messages import ServiceStatus


async def wait_until_connected(
    router: Router, services: Mapping[str, ControlLine], read_addresses: Callable[[], Mapping[str, str]], seconds: float
) -> list[ServiceStatus]:
    """Wait until a target serves and, if there are drafts, is attached to one; return the status of each such target.

    services: how each is called, by name. read_addresses: returns their addresses, for the error.
    seconds: how long to wait; 0: without end. Raises ClusterError, which names the cause.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (seconds or math.inf)
    has_draft = any(side_of(name) == "draft" for name in services)
    while True:
        statuses, errors = await _ask(services)
        targets = {name: status for name, status in statuses.items() if side_of(name) == "target"}
        ready = [target for target in targets.values() if target.attached or not has_draft]
        if ready and router.connected:
            return ready
        addresses = read_addresses()
        words = [_in_words(name, addresses[name], error) for name, error in errors.items()]
        refusals = [status.refusal for status in statuses.values() if status.refusal and has_draft]
        if any(error.code() is grpc.StatusCode.UNAUTHENTICATED for error in errors.values()):
            refusals += words
        if refusals and not any(target.attached for target in targets.values()):
            raise ClusterError(refusals[0])
        if loop.time() > deadline:
            there = ", ".join(addresses[name] for name in targets)
            alone = f"the target at {there} answers, and no draft is attached to it"
            raise ClusterError(f"not connected within {seconds:g} s: {'; '.join(words) or alone}")
        await asyncio.sleep(0.05)


async def _ask(services: Mapping[str, ControlLine]) -> tuple[dict[str, ServiceStatus], dict[str, grpc.aio.AioRpcError]]:
    """Ask each service for its status; return the statuses of those that answer, and the errors of the others."""
    statuses: dict[str, ServiceStatus] = {}
    errors: dict[str, grpc.aio.AioRpcError] = {}
    for name, line in dict(services).items():
        try:
            statuses[name] = await line.status()
        except grpc.aio.AioRpcError as error:
            errors[name] = error
    return statuses, errors


def _in_words(name: str, address: str, error: grpc.aio.AioRpcError) -> str:
    refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
    what = "lets nobody in without its token" if refused else "does not answer; check that it runs there"
    return f"the {name} service at {address} {what} ({error.details()})"
