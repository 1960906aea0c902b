"""The resources that services ask Ray for, and whether Ray can ever provide them. Does not import Ray."""

import logging
from collections.abc import Mapping, Sequence

from specahead.config import ClusterSettings
from specahead.wire.errors import ClusterError

log = logging.getLogger(__name__)


def resources_of(side: str, cluster: ClusterSettings) -> dict[str, float]:
    """Return the custom resource that a node must have to run a service: a thousandth, so that a node can run many."""
    resource = {"target": cluster.node_resources.target, "draft": cluster.node_resources.draft}[side]
    return {resource: 0.001} if resource else {}


def check_room(needs: Sequence[Mapping[str, float]], there: Mapping[str, float]) -> None:
    """Raise ClusterError if services can never run on a Ray that gets no more nodes.

    needs: of each service, by resource. there: how much Ray has of each resource.
    """
    for resource in sorted({name for each in needs for name in each}):
        wanted, has = round(sum(each.get(resource, 0) for each in needs), 3), there.get(resource, 0)
        if wanted > has:
            advice = {
                "GPU": "give --device auto: services then share the GPUs or run on the CPU",
                "CPU": "place fewer services",
            }.get(resource, "check --node-resources")
            raise ClusterError(
                f"the {len(needs)} services need {wanted:g} {resource}, but the Ray that was started on this machine "
                f"has {has:g} and gets no more: {advice}, or name a Ray that has it by --ray-address"
            )


def gpus_of(device: str, there: float, wanted: int) -> int:
    """Return how many GPUs are kept for each GPU that a service wants, one or none.

    there: GPUs of Ray's cluster. wanted: GPUs of all services, one for each rank of a model.
    """
    if device == "auto" and 0 < there < wanted:
        log.warning(
            "Ray has %g of the %d GPUs that the services take, so none is kept for any of them, and all use the first "
            "of their node",
            *(there, wanted),
        )
    return int(device == "cuda" or (device == "auto" and there >= wanted))
