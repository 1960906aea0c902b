"""Watches the services and Ray while clients are served: replaces a service that hangs, restarts a lost Ray.

Ray itself restarts a service that dies. To Ray a hung service is alive, so each is asked for its status every second,
except while it starts. A model step that hangs ends its own process (specahead/engine/steps/step_loop.py).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Supervisor:
    """Watches the services and what placed them."""

    services: Mapping[str, ControlLine]
    """How each is called, by name. Others may come and go meanwhile."""
    placement: "RayPlacement"
    """Its methods may take long, and run in threads."""
    put: Callable[[str, str], None]
    """Takes the name and the new address of a service that did not answer."""
    after_restart: Callable[[], None] = lambda: None
    """Called after each attempt to restart, for what Ray changes in this process when it is started."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the set of placed services changes, so that there is one repair at a time."""

    async def run(self) -> None:
        """Watch until cancelled. Raises ClusterError if the services cannot be placed again."""
        await run_together(self._watch_placement(), self._watch_services())

    async def _watch_services(self) -> None:
        """Watch each service as long as it is there. Runs until cancelled."""
        watches: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for name in [name for name in self.services if name not in watches]:
                    watches[name] = asyncio.create_task(self._watch_service(name))
                for name in [name for name, watch in watches.items() if watch.done()]:
                    watches.pop(name).result()
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            await end_tasks(*watches.values())

    async def _watch_service(self, name: str) -> None:
        """Watch a service until it is removed from the services."""
        missed, serves = 0, False
        while (line := self.services.get(name)) is not None:
            try:
                await line.status()
                if not serves:
                    log.info("the %s service answers", name)
                missed, serves = 0, True
                await asyncio.sleep(BEAT_SECONDS)
                continue
            except grpc.aio.AioRpcError as error:
                if name not in self.services:
                    return
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    missed += 1
                else:  # nobody listens: it is gone, or does not listen yet
                    if serves:
                        log.warning("the %s service is gone; it is being started again", name)
                    missed, serves = 0, False
                    await asyncio.sleep(BEAT_SECONDS)
            async with self.turn:
                if serves and missed >= PATIENCE:
                    silent = missed * BEAT_SECONDS
                    log.error("the %s service has not answered for %g s: it hangs and is replaced", name, silent)
                    missed, serves = 0, not await self._replace(name)
                elif not serves:
                    await self._locate(name)

    async def _locate(self, name: str) -> None:
        """Look up the address of a service that does not answer: Ray may have started it elsewhere."""
        try:
            async with asyncio.timeout(RAY_PATIENCE):
                address = await asyncio.to_thread(self.placement.locate, name)
        except Exception:  # Ray is not there for the moment: it is asked again
            log.debug("the %s service could not be located", name, exc_info=True)
            return
        if address:
            self.put(name, address)

    async def _replace(self, name: str) -> bool:
        """Have a service replaced; returns whether that worked."""
        try:
            await asyncio.to_thread(self.placement.replace, name)
        except Exception:
            log.exception("the %s service could not be replaced", name)
            return False
        return True

    async def _watch_placement(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if await self._is_watched():
                continue
            log.error("Ray is lost, so nobody watches the services: they are placed anew")
            async with self.turn:
                await self._restart()
            log.warning("the services are placed anew")

    async def _is_watched(self) -> bool:
        """Return whether the services are watched. The head of a joined Ray that does not answer may come back for a
        while: services on other nodes go on without it, and are watched again then."""
        alive = await self._is_alive()
        if alive is None and not self.placement.owns_ray:
            log.error("Ray is lost: its head does not answer. Services go on; it has %g s to come back", RAY_AWAY)
            deadline = asyncio.get_running_loop().time() + RAY_AWAY
            while alive is None and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(BEAT_SECONDS)
                alive = await self._is_alive()
            if alive:
                log.warning("Ray answers again")
        return bool(alive)

    async def _is_alive(self) -> bool | None:
        """Return whether the services are watched; None if Ray does not answer."""
        try:
            async with asyncio.timeout(RAY_PATIENCE):
                return await asyncio.to_thread(self.placement.is_alive)
        except Exception:
            log.debug("Ray does not say how its nodes are", exc_info=True)
            return None

    async def _restart(self) -> None:
        for attempt in range(1, RAY_ATTEMPTS + 1):
            try:
                return await asyncio.to_thread(self.placement.restart)
            except Exception as error:
                log.error("attempt %d of %d to place the services anew failed: %s", attempt, RAY_ATTEMPTS, error)
                last = error
            finally:
                self.after_restart()
            await asyncio.sleep(PAUSE_BEATS * BEAT_SECONDS)
        raise ClusterError(f"Ray was lost, and the services could not be placed again: {last}")
