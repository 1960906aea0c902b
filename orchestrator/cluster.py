"""Placing the services with Ray. Ray starts, watches and restarts the processes; no token passes through it."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.utils import read_ray_address

from config import ClusterSettings, Config, DraftSettings, ServiceSettings, SettingsError, TargetSettings
from config.logs import Recorder, Said, configure_logs
from draft_service.service import run as run_draft
from target_service.service import run as run_target
from wire.errors import ClusterError
from wire.server import RunningServer

log = logging.getLogger(__name__)

_LOG_SECONDS = 0.5
# Of the processes of a Ray that was started here: without them it cannot go on.
_NEEDED = {ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER}


class ServiceActor:
    """Hosts one service in its own process. If the service fails, so does the process, and Ray restarts it.

    Only where it fails before it ever served, `pid` says why instead. If the raylet that started the process dies, the
    process ends, too: nobody would watch it, and its port is needed by the service that is placed anew.
    """

    def __init__(self, settings: DraftSettings | TargetSettings, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._listening: Future[int] = Future()
        configure_logs(settings)
        self._said = Recorder()
        logging.getLogger().addHandler(self._said)
        self._served_before = ray.get_runtime_context().was_current_actor_reconstructed
        threading.Thread(target=_end_with_parent, name="raylet", daemon=True).start()
        threading.Thread(target=self._run, args=(settings,), name="service", daemon=True).start()

    def _run(self, settings: DraftSettings | TargetSettings) -> None:
        def on_ready(server: RunningServer) -> None:
            self._listening.set_result(os.getpid())

        try:
            run = (
                run_draft(settings, on_ready) if isinstance(settings, DraftSettings) else run_target(settings, on_ready)
            )
            asyncio.run(run)
        except BaseException as error:
            log.exception("the %s service failed", settings.side)
            if self._listening.done() or self._served_before:  # let Ray start it anew
                os._exit(1)
            said = isinstance(error, ValueError | OSError)  # then its text is meant for a person
            self._listening.set_exception(RuntimeError(f"{error}" if said else f"{type(error).__name__}: {error}"))

    def pid(self) -> int:
        """Wait for the service to listen and return its process id, or raise what kept it from that."""
        return self._listening.result()

    def said(self) -> list[Said]:
        """Return what the service wrote to its log since it was asked last."""
        return self._said.take()


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    log.error("the raylet of this service is gone, so the service ends")
    os._exit(1)


def connect_ray(settings: ClusterSettings) -> TemporaryDirectory[str] | None:
    """Join a running Ray, or start one on loopback; returns the folder of one that was started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": settings.namespace, "log_to_driver": False, "logging_level": "error"}
    address = settings.ray_address if settings.ray_address != "auto" else _running_ray()
    if address is not None:
        log.info("joining the running Ray", extra={"address": address})
        _check_ray_listens(address)
    if address is None or address.rsplit(":", 1)[0] in ("127.0.0.1", "localhost"):
        _keep_ray_on_loopback()
    if address is not None:
        # By its own name where one was given: Ray takes up its token for a cluster that it finds itself only.
        ray.init(address=settings.ray_address, **options)
        return None
    log.info("starting Ray on 127.0.0.1")
    folder = TemporaryDirectory(prefix="specahead-", ignore_cleanup_errors=True)
    options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "_temp_dir": folder.name}
    ray.init(address="local", **options)
    return folder


def _running_ray() -> str | None:
    """RAY_ADDRESS, or where `ray start` on this machine says that its head is, if that listens."""
    named = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE)
    if named:
        return named
    address = read_ray_address()
    if not address:
        return None
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        return address if probe.connect_ex((host, int(port))) == 0 else None


def _check_ray_listens(address: str) -> None:
    """Raise ClusterError if nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        why = error.strerror or error
        raise ClusterError(
            f"no Ray answers at {address} ({why}): check that one runs there, or --ray-address"
        ) from None


def _keep_ray_on_loopback() -> None:
    """Ray replaces a loopback address by the machine's own unless clusters are off, as on a laptop.

    The switch is read from the environment at `import ray`; child processes read it again.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


class RayPlacement:
    """Owns the actors that host the services, and our part of Ray. Ports stay the same over all restarts.

    Made, it has joined or started Ray; `start` starts the services.

    services: address and process id of each by side, as they were when they were placed.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._settings = placed_settings(config)
        self._addresses = addresses_of(self._settings, config.cluster)
        self._actors: dict[str, Any] = {}
        self.services: dict[str, tuple[str, int]] = {}
        self._folder = connect_ray(config.cluster)

    @property
    def owns_ray(self) -> bool:
        """Whether Ray was started here."""
        return self._folder is not None

    def start(self) -> None:
        """Start the services and wait until all listen. Raises ClusterError with a service's own words."""
        services = len(self._settings)
        gpus = gpus_of(self._config.target.device, ray.cluster_resources().get("GPU", 0), services)
        # Fractional CPUs: placement asks for room, the models' threads are set by the settings.
        options = {"num_cpus": 0.1, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 2}
        actor = ray.remote(ServiceActor)
        for settings in self._settings:
            needed = resources_of(settings.side, self._config.cluster)
            named = actor.options(name=settings.side, num_gpus=gpus, resources=needed, **options)
            self._actors[settings.side] = named.remote(settings, trace_variables(settings))
        pids = _wait_for(self._actors)
        self.services = {side: (self._addresses[side], pid) for side, pid in zip(self._actors, pids, strict=True)}

    def stop(self) -> None:
        """Stop the services, and Ray itself if this process started it."""
        if ray.is_initialized():
            for started in reversed(self._actors.values()):
                ray.kill(started, no_restart=True)
        self._leave()

    def _leave(self) -> None:
        self._actors.clear()
        ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()

    def replace(self, side: str) -> None:
        """End a service's process; Ray starts it anew. A process that is stopped is killed after 5 s."""
        ray.kill(self._actors[side], no_restart=False)

    def is_alive(self) -> bool:
        """Return whether Ray watches this node: without its raylet, services that die here stay dead."""
        node = ray._private.worker._global_node  # knows what this process started, at once; the GCS takes 15 s
        if node is not None and {kind for kind, _ in node.dead_processes()} & _NEEDED:
            return False
        ours = ray.get_runtime_context().get_node_id()
        return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == ours)

    def restart(self) -> None:
        """Leave Ray, join or start one, and place the services anew; the old ones have ended themselves by then."""
        self._leave()
        self._folder = connect_ray(self._config.cluster)
        self.start()


@contextlib.contextmanager
def placement_on_ray(config: Config) -> Iterator[RayPlacement]:
    """Join or start Ray; stop the services and our part of Ray at the end."""
    placement = RayPlacement(config)
    try:
        yield placement
    finally:
        placement.stop()


def _wait_for(actors: Mapping[str, Any]) -> list[int]:
    """Return the services' process ids once all listen; until then their logs are shown in ours.

    Raises ClusterError with the words of one that failed.
    """
    waiting = answers = [actor.pid.remote() for actor in actors.values()]
    try:
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOG_SECONDS)
            ready = [answer for answer in answers if answer not in waiting]
            ray.get(ready)  # raises what one of them raised, though others are still loading
            for side, actor in actors.items():
                for level, name, message, fields in ray.get(actor.said.remote()):
                    logging.getLogger(name).log(level, message, extra=fields | {"service": side})
        return ray.get(answers)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise ClusterError(f"a service could not start: {cause}") from None


def placed_settings(config: Config) -> list[TargetSettings | DraftSettings]:
    """Each service's settings with what a launch decides: ports that stay over restarts, and the threads of two models.

    The target comes first. Only it is deterministic; what a draft says changes no token then.
    """
    for side in (config.target, config.draft) if config.has_draft else (config.target,):
        if getattr(config.cluster, f"{side.side}_host") and not side.port:
            raise SettingsError(f"{side.side}_host is given, and others need the port as well: give {side.side}_port")
    threads = config.target.threads or max(1, (os.cpu_count() or 2) // 2)
    traces = config.clients.trace_share > 0
    port = config.target.port or _free_port(config.target.host)
    target = replace(config.target, threads=threads, traces=traces, port=port)
    if not config.has_draft:
        return [target]
    draft = replace(
        config.draft,
        threads=threads,
        traces=traces,
        port=config.draft.port or _free_port(config.draft.host),
        targets=(addresses_of([target], config.cluster)["target"],),
        deterministic=False,
    )
    return [target, draft]


def trace_variables(settings: ServiceSettings) -> dict[str, str]:
    """Return what a service that traces is to know of this process's environment: where OpenTelemetry sends spans."""
    return {name: value for name, value in os.environ.items() if settings.traces and name.startswith("OTEL_")}


def addresses_of(services: Iterable[DraftSettings | TargetSettings], cluster: ClusterSettings) -> dict[str, str]:
    """Where others reach the services, by side."""
    hosts = {"target": cluster.target_host, "draft": cluster.draft_host}
    return {service.side: f"{hosts[service.side] or service.host}:{service.port}" for service in services}


def resources_of(side: str, cluster: ClusterSettings) -> dict[str, float]:
    """What a node must have to run a service, as Ray counts it; a trace, so that one node serves for many."""
    resource = {"target": cluster.target_resource, "draft": cluster.draft_resource}[side]
    return {resource: 0.001} if resource else {}


def gpus_of(device: str, there: float, services: int) -> int:
    """How many of the `there` GPUs of Ray's cluster each of the services gets."""
    return int(device == "cuda" or (device == "auto" and there >= services))


def _free_port(host: str) -> int:
    """A port that is free now. A service keeps it over restarts, so that its peers find it again."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
