"""Watching the services and Ray while clients are served: what hangs is replaced, a lost Ray is started again.

A service that dies is Ray's affair: it starts it again. One that hangs is alive as far as Ray can see, so its status is
asked for every second. While a service starts nothing is expected of it, and a model step that hangs ends its own
process (engine/step_loop.py).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from orchestrator.service_status import AskStatus
from wire.errors import ClusterError
from wire.streams import BEAT_SECONDS, PATIENCE, run_together

log = logging.getLogger(__name__)

RAY_PATIENCE = 10.0  # seconds that Ray may take to say how its nodes are
RAY_ATTEMPTS = 3
PAUSE_BEATS = 5  # between attempts


class Placement(Protocol):
    """What places services. All of it may take long, and runs in a thread."""

    def replace(self, side: str) -> None:
        """End the process of a service, dead or alive, and have it started anew."""

    def is_alive(self) -> bool:
        """Return whether the services are watched, so that one that dies is started anew."""

    def restart(self) -> None:
        """Place all services anew, at their addresses. Raises ClusterError or what Ray raises."""


async def supervise(
    services: Mapping[str, AskStatus], placement: Placement, after_restart: Callable[[], None] = lambda: None
) -> None:
    """Watch the services and what placed them until cancelled. Raises ClusterError if they cannot be placed again.

    services: how each is asked for its status, by side; raises AioRpcError, after BEAT_SECONDS at the latest.
    after_restart: called after each attempt to restart, for what Ray changes in this process when it is started.
    """
    turn = asyncio.Lock()  # one repair at a time
    watches = [_watch_service(side, ask, placement, turn) for side, ask in services.items()]
    await run_together(_watch_placement(placement, turn, after_restart), *watches)


async def _watch_service(side: str, ask: AskStatus, placement: Placement, turn: asyncio.Lock) -> None:
    missed, serves = 0, False
    while True:
        try:
            await ask()
            if not serves:
                log.info("the %s service answers", side)
            missed, serves = 0, True
            await asyncio.sleep(BEAT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                missed += 1
            else:  # nobody listens: it is gone, or does not listen yet
                if serves:
                    log.warning("the %s service is gone; it is being started again", side)
                missed, serves = 0, False
                await asyncio.sleep(BEAT_SECONDS)
        if serves and missed >= PATIENCE:
            log.error("the %s service has not answered for %g s: it hangs and is replaced", side, missed * BEAT_SECONDS)
            async with turn:
                serves = not await _replace(side, placement)
            missed = 0


async def _replace(side: str, placement: Placement) -> bool:
    """Have a service replaced; returns whether that worked."""
    try:
        await asyncio.to_thread(placement.replace, side)
    except Exception:
        log.exception("the %s service could not be replaced", side)
        return False
    return True


async def _watch_placement(placement: Placement, turn: asyncio.Lock, after_restart: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        if await _is_alive(placement):
            continue
        log.error("Ray is lost, so nobody watches the services: they are placed anew")
        async with turn:
            await _restart(placement, after_restart)
        log.warning("the services are placed anew")


async def _is_alive(placement: Placement) -> bool:
    try:
        async with asyncio.timeout(RAY_PATIENCE):
            return await asyncio.to_thread(placement.is_alive)
    except TimeoutError:
        return False


async def _restart(placement: Placement, after_restart: Callable[[], None]) -> None:
    for attempt in range(1, RAY_ATTEMPTS + 1):
        try:
            return await asyncio.to_thread(placement.restart)
        except Exception as error:
            log.error("attempt %d of %d to place the services anew failed: %s", attempt, RAY_ATTEMPTS, error)
            last = error
        finally:
            after_restart()
        await asyncio.sleep(PAUSE_BEATS * BEAT_SECONDS)
    raise ClusterError(f"Ray was lost, and the services could not be placed again: {last}")
