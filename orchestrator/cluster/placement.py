"""Where the services are: they run already, or are placed on Ray."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.cluster.directory import SIDES, Directory, name_services, side_of
from specahead.config import Config
from specahead.config.access import split_list
from specahead.config.clock import clock
from specahead.wire.errors import ClusterError
from specahead.wire.streams import BEAT_SECONDS

if TYPE_CHECKING:
    from orchestrator.cluster.fleet import RayPlacement

log = logging.getLogger(__name__)

# Where the services of each side are.
Directories = Mapping[str, Directory]
# Returns where services listen, by name; may take a second.
Look = Callable[[], Mapping[str, str]]


@contextlib.contextmanager
def placed_services(config: Config) -> Iterator[tuple[Directories, "RayPlacement | None", Look | None]]:
    """Yield the directories of the services, the placement on Ray that keeps them (None: nobody here does), and a
    function that looks for the services of another launch (None: there is none)."""
    cluster = config.cluster
    if cluster.target_address:
        drafts = cluster.draft_address if config.has_draft else ""
        yield _by_side(_named("target", cluster.target_address) | _named("draft", drafts)), None, None
        return
    if cluster.join:
        with _importing_ray():
            from orchestrator.cluster.attach import joined_services

        with joined_services(cluster) as joined:
            there = joined.wait_for_target(config.clients.timeouts.connect)
            yield _by_side(there), None, joined.look
        return
    with _importing_ray():
        from orchestrator.cluster.fleet import RayPlacement

    placement = RayPlacement(config)
    try:
        own = placement.owns_ray
        print("no running Ray was found: started one on 127.0.0.1" if own else "joined the running Ray", flush=True)
        placement.start()
        for name, (address, pid) in placement.services.items():
            print(f"{name} service: pid {pid}, {address}", flush=True)
        addresses = {name: address for name, (address, _) in placement.services.items()}
        yield _by_side(addresses), placement, None
    finally:
        placement.stop()


@contextlib.contextmanager
def _importing_ray() -> Iterator[None]:
    """Import what needs Ray, which a launch over running services does not. Raises ClusterError if that fails."""
    try:
        with clock("loading Ray"):
            yield
    except ImportError as error:
        raise ClusterError(
            f"Ray, which places the services, cannot be imported: {error}; install it (pip install ray), or start the "
            "services yourself and give --target-address"
        ) from None


async def keep_found(look: Look, directories: Directories) -> None:
    """Store the addresses of the services every second. Runs until cancelled."""
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        try:
            there = await asyncio.to_thread(look)
        except Exception:  # Ray does not answer for the moment: known services stay
            log.debug("the services could not be looked for", exc_info=True)
            continue
        for side, directory in directories.items():
            for name in [name for name in directory.addresses if name not in there]:
                directory.remove(name)
            for name in [name for name in there if side_of(name) == side]:
                directory.put(name, there[name])


def addresses_in(directories: Directories) -> dict[str, str]:
    """Return where all services are now, by name."""
    return {name: address for each in directories.values() for name, address in each.addresses.items()}


def _named(side: str, addresses: str) -> dict[str, str]:
    """Return addresses that commas separate, by the names of their services."""
    given = split_list(addresses)
    return dict(zip(name_services(side, len(given)), given, strict=True))


def _by_side(addresses: Mapping[str, str]) -> Directories:
    return {
        side: Directory({name: address for name, address in addresses.items() if side_of(name) == side})
        for side in SIDES
    }
