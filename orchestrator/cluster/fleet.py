"""Placing the services with Ray. Ray starts, watches and restarts the processes; no token passes through it."""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import ray
from ray._private import ray_constants
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from orchestrator.cluster.choice import machine_of, with_choice
from orchestrator.cluster.connect_ray import check_ray_listens, connect_ray
from orchestrator.cluster.directory import name_services, side_of
from orchestrator.cluster.room import check_room, gpus_of, resources_of
from orchestrator.cluster.service_actor import ServiceActor
from specahead.config import Config, DraftSettings, TargetSettings
from specahead.config.logs import log_once
from specahead.wire.errors import ClusterError

log = logging.getLogger(__name__)

_LOG_SECONDS = 0.5
_ROOM_SECONDS = 10.0
_CPUS = 0.1  # of a service: placement asks for room, the models' threads are set by the settings
# Of the processes of a Ray that was started here: without them it cannot go on.
_NEEDED = {ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER}


class RayPlacement:
    """Owns our part of Ray and the actors that host the services.

    Its constructor joins or starts Ray; `start` starts the services. services: the address and process id of each
    service by name, as they were when they were placed. actors: the placed services by name, starting ones included.
    choice: how they are placed.
    """

    def __init__(self, config: Config) -> None:
        self._folder = connect_ray(config.cluster)
        self._config, self.choice = with_choice(config, machine_of(ray.cluster_resources()))
        self._gpus = 0  # of each rank of a service
        self._neighbours = 1  # services of a node, about
        self._groups: dict[tuple[str, ...], Any] = {}  # by the names of the services that are near each other
        self._start: dict[str, Callable[[], Any]] = {}  # starts the actor of a service and returns its handle
        self._asked: dict[str, Any] = {}  # pending answers of services about their address
        self.actors: dict[str, Any] = {}
        self.services: dict[str, tuple[str, int]] = {}
        self._head = ray.get_runtime_context().gcs_address

    @property
    def owns_ray(self) -> bool:
        """Whether Ray was started here."""
        return self._folder is not None

    @property
    def names(self) -> list[str]:
        """All placed services, starting ones included; targets in the order in which they came."""
        return list(self.actors)

    def start(self) -> None:
        """Start the services and wait until all listen.

        Raises ClusterError with a service's own words, or if a Ray that was started here can never run the services.
        """
        there, settings = ray.cluster_resources(), placed_settings(self._config)
        self._gpus = gpus_of(
            self._config.target.device, there.get("GPU", 0), sum(each.tensor_parallel_size for each in settings)
        )
        self._neighbours = math.ceil(len(settings) / sum(node["Alive"] for node in ray.nodes()))
        needs = [each for pair in pairs_of(settings) for each in self._reserve(pair)]
        if self.owns_ray:
            check_room(needs, there)
        for names, group in self._groups.items():
            # Nodes may be on their way. Unlike PlacementGroup.wait, ray.wait lets signals end it.
            while not ray.wait([group.ready()], timeout=_ROOM_SECONDS)[0]:
                log.warning(
                    "waiting until Ray has room for %s", " and ".join(names), extra={"needs": str(group.bundle_specs)}
                )
        self.actors = {name: start() for name, start in self._start.items()}
        self.services = _wait_for(self.actors)

    def _reserve(self, near: list[TargetSettings | DraftSettings]) -> list[dict[str, float]]:
        """Ask Ray for room for services near each other, and note how each is started there; return their needs."""
        cluster = self._config.cluster
        needs = [
            # The GPUs of a service are on one node, since they are of one bundle.
            {"CPU": _CPUS, "GPU": self._gpus * settings.tensor_parallel_size} | resources_of(settings.side, cluster)
            for settings in near
        ]
        group = self._groups[tuple(settings.name for settings in near)] = placement_group(needs, strategy="PACK")
        for index, (settings, needed) in enumerate(zip(near, needs, strict=True)):
            place = PlacementGroupSchedulingStrategy(group, index)
            self._start[settings.name] = partial(_start_actor, settings, needed, place, self._neighbours)
        return needs

    def add_target(self) -> None:
        """Have one more target started, with the drafts that come with it, as soon as Ray has or gets room for them."""
        placed = self.names
        wanted = placed_settings(self._config, 1 + sum(side_of(name) == "target" for name in placed))
        self._reserve(fresh := [settings for settings in wanted if settings.name not in placed])
        self.actors |= {settings.name: self._start[settings.name]() for settings in fresh}

    @property
    def latest(self) -> list[str]:
        """The services that were placed last, near each other: a target, and the drafts that came with it."""
        return list(next(reversed(self._groups)))

    def remove_target(self) -> None:
        """End the services that were placed last, and give their room back."""
        names, group = self._groups.popitem()
        for name in names:
            ray.kill(self.actors.pop(name), no_restart=True)
            self._asked.pop(name, None)
            del self._start[name]
        remove_placement_group(group)

    def locate(self, name: str) -> str:
        """Return where a service listens; "" while it starts. A process that has just died may answer once more."""
        if name not in self._asked:
            self._asked[name] = self.actors[name].where.remote()
        done, _ = ray.wait([self._asked[name]], timeout=0)
        if not done:
            return ""
        try:
            address, _ = ray.get(self._asked.pop(name))
        except ray.exceptions.ActorDiedError as error:  # Ray does not start it again
            log.error("the %s service could not even be loaded, it is tried anew: %s", name, error)
            self.actors[name] = self._start[name]()
            return ""
        return str(address)

    def replace(self, name: str) -> None:
        """End a service's process; Ray starts it anew. A process that is stopped is killed after 5 s."""
        ray.kill(self.actors[name], no_restart=False)

    def stop(self) -> None:
        """Stop the services, and Ray itself if this process started it. Those of a Ray without its head end with it."""
        if ray.is_initialized():
            try:
                self._check_head()
            except ClusterError as error:
                log.error("the services are not stopped, their nodes end them: %s", error)
                return
            for actor in [*self.actors.values()][::-1]:
                ray.kill(actor, no_restart=True)
        self._leave()

    def _check_head(self) -> None:
        """Raise ClusterError if the head of a joined Ray is gone: calls to it then take minutes to fail."""
        if not self.owns_ray:
            check_ray_listens(self._head)

    def _leave(self) -> None:
        for each in (self.actors, self._asked, self._start, self._groups):
            each.clear()
        ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()

    def is_alive(self) -> bool:
        """Return whether Ray watches this node: without its raylet, services that die here stay dead.

        Raises ClusterError if the head of a joined Ray is gone.
        """
        node = ray._private.worker._global_node  # knows what this process started, at once; the GCS takes 15 s
        if node is not None and {kind for kind, _ in node.dead_processes()} & _NEEDED:
            return False
        self._check_head()
        ours = ray.get_runtime_context().get_node_id()
        return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == ours)

    def restart(self) -> None:
        """Leave Ray, join or start one, and place the services anew; the old ones have ended themselves by then.

        Raises ClusterError, and leaves everything as it is, if the head of a joined Ray is gone.
        """
        self._check_head()
        self._leave()
        self._folder = connect_ray(self._config.cluster)
        self._head = ray.get_runtime_context().gcs_address
        self.start()


def _start_actor(
    settings: TargetSettings | DraftSettings,
    needs: Mapping[str, float],
    place: PlacementGroupSchedulingStrategy,
    neighbours: int,
) -> Any:
    """Have Ray start a service, and start it again whenever its process or its node is lost; return its handle."""
    resources = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
    actor = ray.remote(ServiceActor).options(
        name=settings.name,
        num_cpus=needs["CPU"],
        num_gpus=needs["GPU"],
        resources=resources,
        scheduling_strategy=place,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=2,
    )
    return actor.remote(settings, neighbours)


def _wait_for(actors: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the services' addresses and process ids once all listen; until then their logs are shown in ours.

    Raises ClusterError with the words of one that failed.
    """
    waiting = answers = [actor.where.remote() for actor in actors.values()]
    logged: set[str] = set()
    progress = tqdm(total=len(actors), desc="loading and preparing", unit="service", leave=False, disable=None)
    try:
        with progress, contextlib.nullcontext() if progress.disable else logging_redirect_tqdm():
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOG_SECONDS)
                ready = [answer for answer in answers if answer not in waiting]
                ray.get(ready)  # raises what one of them raised, though others are still loading
                log_once({name: ray.get(actor.said.remote()) for name, actor in actors.items()}, logged)
                progress.n = len(ready)
                progress.refresh()
        return dict(zip(actors, ray.get(answers), strict=True))
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise ClusterError(f"a service could not start: {cause}") from None


def placed_settings(config: Config, targets: int = 0) -> list[TargetSettings | DraftSettings]:
    """Return the settings of each service, with its name, and with its port where one is given: targets count on from
    it, then drafts.

    targets: how many there are; 0: the launch's first number; drafts are in proportion.
    Only targets are deterministic: a draft changes no token of theirs. Where the target's KV lies in host memory,
    kv_tokens and kv_memory say what its GPU holds of it; a draft has room for all of its own KV.
    """
    first_port = config.target.port
    placed: list[TargetSettings | DraftSettings] = []
    begin = max(1, config.cluster.targets)
    most = max(begin, config.cluster.autoscaling.max_targets)
    draft = replace(config.draft, kv_tokens=0, kv_memory=0.0) if config.target.host_kv_memory else config.draft
    for side in (config.target, draft):
        present, all_names = (_count(config, side.side, count) for count in (targets or begin, most))
        for index, name in enumerate(name_services(side.side, all_names)[:present]):
            port = first_port + index + (most if side.side == "draft" else 0) if first_port else 0
            deterministic = side.deterministic and side.side == "target"
            placed.append(replace(side, name=name, port=port, deterministic=deterministic))
    return placed


def _count(config: Config, side: str, targets: int) -> int:
    """Return the number of services of a side for a number of targets."""
    if side == "target":
        return targets
    cluster = config.cluster
    return math.ceil(max(1, cluster.drafts) * targets / max(1, cluster.targets)) if config.has_draft else 0


def pairs_of(settings: list[TargetSettings | DraftSettings]) -> list[list[TargetSettings | DraftSettings]]:
    """Return the services that should run near each other: the first target and the first draft, the second ones, …"""
    targets, drafts = ([each for each in settings if each.side == side] for side in ("target", "draft"))
    return [[each for each in pair if each is not None] for pair in zip_longest(targets, drafts)]
