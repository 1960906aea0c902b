"""Where target and draft are: those that run already, or new ones on Ray."""

import contextlib
from collections.abc import Iterator

from config import Config
from orchestrator.supervision import Placement
from wire.server import check_free


def check_addresses(config: Config) -> None:
    """Raise OSError for an address of this launch that something else listens on."""
    listening = [(config.clients.host, config.clients.grpc_port), (config.clients.host, config.clients.http_port)]
    if not config.cluster.target_address:
        named = [(config.target, config.cluster.target_host), (config.draft, config.cluster.draft_host)]
        named = named if config.has_draft else named[:1]
        listening += [(side.host, side.port) for side, name in named if not name]  # else on any machine
    for host, port in listening:
        check_free(host, port)


@contextlib.contextmanager
def placed_services(config: Config) -> Iterator[tuple[str, str, Placement | None]]:
    """Addresses of target and draft, and what keeps them: those that run already, or new ones on Ray.

    The draft's is empty if there is none.
    """
    if config.cluster.target_address:
        yield config.cluster.target_address, config.cluster.draft_address if config.has_draft else "", None
        return
    from orchestrator.cluster import placement_on_ray  # a launch over running services needs no Ray

    with placement_on_ray(config) as placement:
        own = placement.owns_ray
        print("no running Ray was found: started one on 127.0.0.1" if own else "joined the running Ray", flush=True)
        placement.start()
        for name, (address, pid) in placement.services.items():
            print(f"{name} service: pid {pid}, {address}", flush=True)
        addresses = {name: address for name, (address, _) in placement.services.items()}
        yield addresses["target"], addresses.get("draft", ""), placement
