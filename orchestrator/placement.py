"""Where the services are: those that run already, or new ones on Ray."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from config import Config
from orchestrator.autoscaling import Fleets
from orchestrator.directory import SIDES, Directory, name_services, services_of, side_of
from wire.server import check_free

# Where the services of each side are.
Directories = Mapping[str, Directory]


def check_addresses(config: Config) -> None:
    """Raise OSError for an address of this launch's client endpoints that something else listens on."""
    for port in (config.clients.grpc_port, config.clients.http_port):
        check_free(config.clients.host, port)


@contextlib.contextmanager
def placed_services(config: Config) -> Iterator[tuple[list[Directories], Fleets | None]]:
    """Yield where the services of each model are, and what keeps them: None for those that run already, else Ray."""
    if config.cluster.target_address:
        yield [_running(model, config.label(model)) for model in config.by_model], None
        return
    from orchestrator.cluster import placement_on_ray  # a launch over running services needs no Ray

    with placement_on_ray(config) as placement:
        own = placement.owns_ray
        print("no running Ray was found: started one on 127.0.0.1" if own else "joined the running Ray", flush=True)
        placement.start()
        for name, (address, pid) in placement.services.items():
            print(f"{name} service: pid {pid}, {address}", flush=True)
        addresses = {name: address for name, (address, _) in placement.services.items()}
        yield [_by_side(services_of(model.model_name, addresses)) for model in config.by_model], placement


def addresses_in(directories: Iterable[Directories]) -> dict[str, str]:
    """Return where all services are now, by name."""
    every = (each for where in directories for each in where.values())
    return {name: address for each in every for name, address in each.addresses.items()}


def _running(config: Config, label: str) -> Directories:
    """Return where the services are that run already for a model. label: stands in their names."""
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
