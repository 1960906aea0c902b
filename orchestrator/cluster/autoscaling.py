"""Adjusts the number of targets to the load: places more, and drains and then ends surplus ones.

A target is added when the load has asked for more throughout a delay, and removed when it has asked for fewer. A
draining target takes no new sessions from any gateway and is ended after its last session, so no stream ends with it.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import grpc

from orchestrator.cluster.directory import Directory, side_of
from orchestrator.cluster.service_status import ControlLine
from orchestrator.cluster.supervision import RAY_PATIENCE
from orchestrator.sessions.target_stream import TargetStream
from specahead.config.launch import Autoscaling
from specahead.wire.streams import BEAT_SECONDS

if TYPE_CHECKING:
    from orchestrator.cluster.fleet import RayPlacement

log = logging.getLogger(__name__)

_QUIET_BEATS = 3  # that a target is without sessions before it is ended: gateways know by then that it drains


class TargetLoad(NamedTuple):
    """The load of a target."""

    kv_use: float
    """Share of its KV room that is taken."""
    wait: float
    """Seconds that a new session would wait."""


def direction_of(loads: Sequence[TargetLoad], present: int, settings: Autoscaling) -> int:
    """Return 1 if the serving targets have too much load and no other starts, -1 if one fewer than `present` would have
    enough room for it, else 0. loads: of the serving targets, at least one."""
    count = len(loads)
    use, wait = (sum(values) for values in zip(*loads, strict=True))
    if use > count * settings.kv_use or wait > count * settings.wait:
        return int(count == present)
    return -(use <= (present - 1) * settings.kv_use and wait <= count * settings.wait / 2)


@dataclass(eq=False)
class Autoscaler:
    """Owns the number of placed targets that stay; the latest ones go first."""

    settings: Autoscaling
    least: int
    """Targets that stay whatever the load is."""
    targets: Mapping[str, TargetStream]
    """The streams to serving targets."""
    lines: Mapping[str, ControlLine]
    """Calls services by name."""
    directories: Mapping[str, Directory]
    """The addresses of services, by side."""
    placement: "RayPlacement"
    """Places the services; its methods may take long and run in a thread."""
    turn: asyncio.Lock
    """Held while the set of placed services changes."""
    _staying: int = field(default=0, init=False)
    _direction: int = field(default=0, init=False)  # that the load asks for
    _since: float = field(default=0.0, init=False)  # when it began to ask for that
    _quiet: int = field(default=0, init=False)  # beats since the latest target has had sessions

    def decide(self, loads: Sequence[TargetLoad], present: int, now: float) -> int:
        """Return how many targets there should be from now on.

        loads: of the serving targets. present: targets, starting ones included. now: in seconds.
        """
        direction = direction_of(loads, present, self.settings) if loads else 0
        if not self.least <= present + direction <= self.settings.max_targets:
            direction = 0
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay = self.settings.in_delay if direction < 0 else self.settings.out_delay
        if not direction or now - self._since < delay:
            return present
        self._direction = 0
        return present + direction

    async def run(self) -> None:
        """Look at the load every second, and act. Runs until cancelled."""
        self._staying = self.least
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                async with self.turn, asyncio.timeout(RAY_PATIENCE):
                    await self._step()
            except Exception:  # Ray is not there for the moment
                log.exception("the number of targets could not be adjusted; the next second tries again")

    async def _step(self) -> None:
        self._forget_lost()
        placed = [name for name in self.placement.names if side_of(name) == "target"]
        present = self._staying = min(self._staying, len(placed))
        loads = [load_of(stream) for name in placed[:present] if (stream := self._serving(name)) is not None]
        self._staying = self.decide(loads, present, asyncio.get_running_loop().time())
        if self._staying != present:
            log.warning("the load asks for %d targets instead of %d", self._staying, present, extra={"loads": loads})
        for _ in range(self._staying - len(placed)):
            await asyncio.to_thread(self.placement.add_target)
        await self._drain(placed)
        if len(placed) > self._staying and self._is_over(placed[-1]):
            await self._end_latest()
        await self._find_started()

    def _serving(self, name: str) -> TargetStream | None:
        stream = self.targets.get(name)
        return stream if stream is not None and stream.connected and stream.view.report.kv_pages else None

    def _forget_lost(self) -> None:
        """Forget services that are missing since Ray was restarted."""
        names = self.placement.names
        for directory in self.directories.values():
            for name in [name for name in directory.addresses if name not in names]:
                directory.remove(name)

    async def _drain(self, placed: list[str]) -> None:
        """Tell each target whether it drains, unless it reports so already."""
        for number, name in enumerate(placed):
            stream, draining = self._serving(name), number >= self._staying
            if stream is not None and stream.view.report.draining != draining:
                try:
                    await self.lines[name].drain(draining)
                except grpc.aio.AioRpcError:
                    log.debug("%s did not take whether it drains", name, exc_info=True)  # the next beat tries again

    def _is_over(self, name: str) -> bool:
        """Return whether a surplus target may be ended: it still starts, or has had no sessions for a while.

        A lost target has none.
        """
        stream = self._serving(name)
        if name not in self.directories["target"].addresses:
            return True
        is_quiet = stream is None or (stream.view.report.draining and not stream.view.sessions)
        self._quiet = self._quiet + 1 if is_quiet else 0
        return self._quiet >= _QUIET_BEATS

    async def _end_latest(self) -> None:
        names, self._quiet = self.placement.latest, 0
        for name in names:
            if name in (directory := self.directories[side_of(name)]).addresses:
                directory.remove(name)
        await asyncio.to_thread(self.placement.remove_target)
        log.warning("%s ended: the load does not ask for more", " and ".join(names))

    async def _find_started(self) -> None:
        """Look up the addresses of services that have started."""
        for name in self.placement.names:
            if name in (directory := self.directories[side_of(name)]).addresses:
                continue
            try:
                address = await asyncio.to_thread(self.placement.locate, name)
            except Exception as error:
                log.error("the %s service could not start and is tried again: %s", name, error)
                await asyncio.to_thread(self.placement.replace, name)
                continue
            if address:
                directory.put(name, address)
                log.warning("%s serves at %s", name, address)


def load_of(stream: TargetStream) -> TargetLoad:
    """Return the load of a target as it reports it itself."""
    report = stream.view.report
    return TargetLoad(1 - report.free_kv_pages / report.kv_pages, stream.view.expected_wait)
