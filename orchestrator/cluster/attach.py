"""Finds the services that another launch has placed, through the Ray that runs them, for one more gateway."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray

from orchestrator.cluster.connect_ray import connect_ray
from orchestrator.cluster.directory import SIDES, side_of
from specahead.config import ClusterSettings
from specahead.wire.errors import ClusterError

_LOOK_SECONDS = 0.5


class JoinedServices:
    """Asks Ray for the services that run in a namespace."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}  # pending answers of services about their address
        self._addresses: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        """Return the addresses of the services, by name; of a service that restarts, the last one."""
        names = [name for name in ray.util.list_named_actors() if side_of(name) in SIDES]
        for name in names:
            if name not in self._asked:
                with contextlib.suppress(ValueError):  # it has ended since
                    self._asked[name] = ray.get_actor(name).where.remote()
        asked = list(self._asked.values())
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=_LOOK_SECONDS) if asked else ([], [])
        for name in [name for name, ref in self._asked.items() if ref in done]:
            with contextlib.suppress(ray.exceptions.RayError):  # it is asked again
                self._addresses[name], _ = ray.get(self._asked.pop(name))
        self._addresses = {name: address for name, address in self._addresses.items() if name in names}
        return dict(self._addresses)

    def wait_for_target(self, seconds: float) -> dict[str, str]:
        """Return where the services listen as soon as there is a target. Raises ClusterError.

        seconds: how long to wait; 0: as long as it takes.
        """
        until = time.monotonic() + (seconds or float("inf"))
        while True:
            there = self.look()
            if any(side_of(name) == "target" for name in there):
                return there
            if time.monotonic() > until:
                raise ClusterError(
                    f"join: no target serves in this namespace of Ray after {seconds:g} s; start a launch that places "
                    "one, or check --namespace and --ray-address"
                )
            time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def joined_services(settings: ClusterSettings) -> Iterator[JoinedServices]:
    """Join the Ray that runs, and leave it at the end. Raises ClusterError if there is none."""
    folder = connect_ray(settings)
    try:
        if folder is not None:
            raise ClusterError("join: no running Ray was found; give --ray-address")
        yield JoinedServices()
    finally:
        ray.shutdown()
        if folder is not None:
            folder.cleanup()
