"""Where the services are: they run already, or are placed on Ray."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.cluster.directory import SIDES, Directory, name_services, services_of, side_of
from specahead.config import Config
from specahead.wire.streams import BEAT_SECONDS

if TYPE_CHECKING:
    from orchestrator.cluster.fleet import RayPlacement

log = logging.getLogger(__name__)

# Where the services of each side are.
Directories = Mapping[str, Directory]
# Returns where services listen, by name; may take a second.
Look = Callable[[], Mapping[str, str]]


@contextlib.contextmanager
def placed_services(config: Config) -> Iterator[tuple[list[Directories], "RayPlacement | None", Look | None]]:
    """Yield the directories of each model's services, the placement on Ray that keeps them (None: nobody here does),
    and a function that looks for the services of another launch (None: there is none)."""
    if config.cluster.target_address:
        yield [_running(model, config.label(model)) for model in config.by_model], None, None
        return
    if config.cluster.join:
        from orchestrator.cluster.attach import joined_services  # the same

        names = [model.model_name for model in config.by_model]
        with joined_services(config.cluster) as joined:
            there = joined.wait_for(names, config.clients.timeouts.connect)
            yield [_by_side(services_of(name, there)) for name in names], None, joined.look
        return
    from orchestrator.cluster.fleet import placement_on_ray  # a launch over running services needs no Ray

    with placement_on_ray(config) as placement:
        own = placement.owns_ray
        print("no running Ray was found: started one on 127.0.0.1" if own else "joined the running Ray", flush=True)
        placement.start()
        for name, (address, pid) in placement.services.items():
            print(f"{name} service: pid {pid}, {address}", flush=True)
        addresses = {name: address for name, (address, _) in placement.services.items()}
        yield [_by_side(services_of(model.model_name, addresses)) for model in config.by_model], placement, None


async def keep_found(look: Look, models: Mapping[str, Directories]) -> None:
    """Store the addresses of the services every second. models: the directories of each. Runs until cancelled."""
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        try:
            there = await asyncio.to_thread(look)
        except Exception:  # Ray does not answer for the moment: known services stay
            log.debug("the services could not be looked for", exc_info=True)
            continue
        for model, where in models.items():
            own = services_of(model, there)
            for side, directory in where.items():
                for name in [name for name in directory.addresses if name not in own]:
                    directory.remove(name)
                for name in [name for name in own if side_of(name) == side]:
                    directory.put(name, own[name])


def addresses_in(directories: Iterable[Directories]) -> dict[str, str]:
    """Return where all services are now, by name."""
    every = (each for where in directories for each in where.values())
    return {name: address for each in every for name, address in each.addresses.items()}


def _running(config: Config, label: str) -> Directories:
    """Return the directories of the services that run already for a model. label: a part of their names."""
    cluster = config.cluster
    targets = _named("target", cluster.target_address, label)
    drafts = _named("draft", cluster.draft_address if config.has_draft else "", label)
    return _by_side(targets | drafts)


def _named(side: str, addresses: str, label: str) -> dict[str, str]:
    """Return addresses that are given with commas between them, by the names of their services."""
    given = [address.strip() for address in addresses.split(",") if address.strip()]
    return dict(zip(name_services(side, len(given), label), given, strict=True))


def _by_side(addresses: Mapping[str, str]) -> Directories:
    return {
        side: Directory({name: address for name, address in addresses.items() if side_of(name) == side})
        for side in SIDES
    }
