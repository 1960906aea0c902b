"""Watches the services and Ray while clients are served: replaces a service that hangs, restarts a lost Ray.

Ray itself restarts a service that dies. To Ray a hung service is alive, so each is asked for its status every second,
except while it starts. A model step that hangs ends its own process (specahead/engine/steps/step_loop.py).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import grpc

from orchestrator.cluster.service_status import ControlLine
from specahead.wire.errors import ClusterError
from specahead.wire.streams import BEAT_SECONDS, PATIENCE
from specahead.wire.tasks import end_tasks, run_together

if TYPE_CHECKING:
    from orchestrator.cluster.fleet import RayPlacement

log = logging.getLogger(__name__)

RAY_PATIENCE = 10.0  # seconds that Ray may take to say how its nodes are
RAY_AWAY = 40.0  # seconds that the head of a joined Ray may be away; its raylets, and clients as this, wait for 60
RAY_ATTEMPTS = 3
PAUSE_BEATS = 5  # between attempts


async def supervise(
    services: Mapping[str, ControlLine],
    placement: "RayPlacement",
    put: Callable[[str, str], None],
    after_restart: Callable[[], None] = lambda: None,
    turn: asyncio.Lock | None = None,
) -> None:
    """Watch the services and what placed them until cancelled. Raises ClusterError if they cannot be placed again.

    services: how each is called, by name. Others may come and go meanwhile. placement: its methods may take long, and
    run in threads.
    put: takes the name and the new address of a service that did not answer.
    after_restart: called after each attempt to restart, for what Ray changes in this process when it is started.
    turn: held while the set of placed services changes, so that there is one repair at a time.
    """
    turn = turn or asyncio.Lock()
    watching = _watch_services(services, placement, put, turn)
    await run_together(_watch_placement(placement, turn, after_restart), watching)


async def _watch_services(
    services: Mapping[str, ControlLine], placement: "RayPlacement", put: Callable[[str, str], None], turn: asyncio.Lock
) -> None:
    """Watch each service as long as it is there. Runs until cancelled."""
    watches: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            for name in [name for name in services if name not in watches]:
                watches[name] = asyncio.create_task(_watch_service(name, services, placement, put, turn))
            for name in [name for name, watch in watches.items() if watch.done()]:
                watches.pop(name).result()
            await asyncio.sleep(BEAT_SECONDS)
    finally:
        await end_tasks(*watches.values())


async def _watch_service(
    name: str,
    services: Mapping[str, ControlLine],
    placement: "RayPlacement",
    put: Callable[[str, str], None],
    turn: asyncio.Lock,
) -> None:
    """Watch a service until it is removed from the services."""
    missed, serves = 0, False
    while (line := services.get(name)) is not None:
        try:
            await line.status()
            if not serves:
                log.info("the %s service answers", name)
            missed, serves = 0, True
            await asyncio.sleep(BEAT_SECONDS)
            continue
        except grpc.aio.AioRpcError as error:
            if name not in services:
                return
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                missed += 1
            else:  # nobody listens: it is gone, or does not listen yet
                if serves:
                    log.warning("the %s service is gone; it is being started again", name)
                missed, serves = 0, False
                await asyncio.sleep(BEAT_SECONDS)
        async with turn:
            if serves and missed >= PATIENCE:
                log.error(
                    "the %s service has not answered for %g s: it hangs and is replaced", name, missed * BEAT_SECONDS
                )
                missed, serves = 0, not await _replace(name, placement)
            elif not serves:
                await _locate(name, placement, put)


async def _locate(name: str, placement: "RayPlacement", put: Callable[[str, str], None]) -> None:
    """Look up the address of a service that does not answer: Ray may have started it elsewhere."""
    try:
        async with asyncio.timeout(RAY_PATIENCE):
            address = await asyncio.to_thread(placement.locate, name)
    except Exception:  # Ray is not there for the moment: it is asked again
        log.debug("the %s service could not be located", name, exc_info=True)
        return
    if address:
        put(name, address)


async def _replace(name: str, placement: "RayPlacement") -> bool:
    """Have a service replaced; returns whether that worked."""
    try:
        await asyncio.to_thread(placement.replace, name)
    except Exception:
        log.exception("the %s service could not be replaced", name)
        return False
    return True


async def _watch_placement(placement: "RayPlacement", turn: asyncio.Lock, after_restart: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        if await _is_watched(placement):
            continue
        log.error("Ray is lost, so nobody watches the services: they are placed anew")
        async with turn:
            await _restart(placement, after_restart)
        log.warning("the services are placed anew")


async def _is_watched(placement: "RayPlacement") -> bool:
    """Return whether the services are watched. The head of a joined Ray that does not answer may come back for a while:
    services on other nodes go on without it, and are watched again then."""
    alive = await _is_alive(placement)
    if alive is None and not placement.owns_ray:
        log.error("Ray is lost: its head does not answer. Services go on; it has %g s to come back", RAY_AWAY)
        deadline = asyncio.get_running_loop().time() + RAY_AWAY
        while alive is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(BEAT_SECONDS)
            alive = await _is_alive(placement)
        if alive:
            log.warning("Ray answers again")
    return bool(alive)


async def _is_alive(placement: "RayPlacement") -> bool | None:
    """Return whether the services are watched; None if Ray does not answer."""
    try:
        async with asyncio.timeout(RAY_PATIENCE):
            return await asyncio.to_thread(placement.is_alive)
    except Exception:
        log.debug("Ray does not say how its nodes are", exc_info=True)
        return None


async def _restart(placement: "RayPlacement", after_restart: Callable[[], None]) -> None:
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
