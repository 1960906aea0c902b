"""Placing the services with Ray. Ray starts, watches and restarts the processes; no token passes through it."""

import asyncio
import logging
import os
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.utils import read_ray_address

from config import ClusterSettings, Config, DraftSettings, TargetSettings
from draft_service.service import run as run_draft
from target_service.service import run as run_target
from wire.server import RunningServer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceInfo:
    """Where a service listens and which process it is."""

    address: str
    pid: int


class ServiceActor:
    """Hosts one service in its own process. If the service fails, so does the process, and Ray restarts it."""

    def __init__(self, settings: DraftSettings | TargetSettings) -> None:
        self._started = threading.Event()
        self._address = ""
        self._failure: BaseException | None = None
        self._ready = False
        threading.Thread(target=self._run, args=(settings,), name="service", daemon=True).start()

    def _run(self, settings: DraftSettings | TargetSettings) -> None:
        def on_ready(server: RunningServer) -> None:
            self._address, self._ready = server.address, True
            self._started.set()

        try:
            run = (
                run_draft(settings, on_ready) if isinstance(settings, DraftSettings) else run_target(settings, on_ready)
            )
            asyncio.run(run)
        except BaseException as error:
            log.exception("the %s service failed", settings.side)
            self._failure = error
            if self._ready:  # it served already: let Ray start it anew
                os._exit(1)
        self._started.set()

    def info(self) -> ServiceInfo:
        """Waits for the service to listen; raises what kept it from that."""
        self._started.wait()
        if self._failure is not None:
            raise RuntimeError(f"{type(self._failure).__name__}: {self._failure}")
        return ServiceInfo(self._address, os.getpid())


class ClusterError(RuntimeError):
    """Ray or a service could not be started."""


@dataclass
class Cluster:
    """The running services."""

    target: Any
    draft: Any
    target_info: ServiceInfo
    draft_info: ServiceInfo

    def stop(self) -> None:
        for actor in (self.draft, self.target):
            ray.kill(actor, no_restart=True)
        ray.shutdown()  # ends Ray itself only if this process started it


def connect_ray(settings: ClusterSettings) -> bool:
    """Join a running Ray, or start one on loopback; True if it was started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": settings.namespace, "log_to_driver": False, "logging_level": "error"}
    address = settings.ray_address if settings.ray_address != "auto" else _running_ray()
    if address is None or address.rsplit(":", 1)[0] in ("127.0.0.1", "localhost"):
        _keep_ray_on_loopback()
    if address is not None:
        # By its own name where one was given: Ray takes up its token for a cluster that it finds itself only.
        ray.init(address=settings.ray_address, **options)
        return False
    ray.init(address="local", _node_ip_address="127.0.0.1", include_dashboard=False, **options)
    return True


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


def _keep_ray_on_loopback() -> None:
    """Ray replaces a loopback address by the machine's own unless clusters are off, as on a laptop.

    The switch is read from the environment at `import ray`; child processes read it again.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def start_services(config: Config) -> Cluster:
    """Start target and draft and wait until both listen. Raises ClusterError with a service's own words."""
    target_settings, draft_settings = placed_settings(config)
    target_gpus, draft_gpus = gpus_of(config.target.device, ray.cluster_resources().get("GPU", 0))
    # Fractional CPUs: placement asks for room, the models' threads are set above.
    options = {"num_cpus": 0.1, "max_restarts": -1, "max_task_retries": -1}
    actor = ray.remote(ServiceActor)
    target = actor.options(name="target", num_gpus=target_gpus, **options).remote(target_settings)
    draft = actor.options(name="draft", num_gpus=draft_gpus, **options).remote(draft_settings)
    try:
        target_info, draft_info = ray.get([target.info.remote(), draft.info.remote()])
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise ClusterError(f"a service could not start: {cause}") from None
    return Cluster(target, draft, target_info, draft_info)


def placed_settings(config: Config) -> tuple[TargetSettings, DraftSettings]:
    """Each service's settings with what a launch decides: ports that stay over restarts, and the threads of two models.

    Only the target is deterministic; what the draft says changes no token then.
    """
    threads = config.target.threads or max(1, (os.cpu_count() or 2) // 2)
    target = replace(config.target, threads=threads, port=config.target.port or _free_port(config.target.host))
    draft = replace(
        config.draft,
        threads=threads,
        port=config.draft.port or _free_port(config.draft.host),
        targets=(f"{target.host}:{target.port}",),
        deterministic=False,
    )
    return target, draft


def gpus_of(device: str, there: float) -> tuple[int, int]:
    """How many of the `there` GPUs of Ray's cluster target and draft get."""
    return (1, 1) if device == "cuda" or (device == "auto" and there >= 2) else (0, 0)


def _free_port(host: str) -> int:
    """A port that is free now. A service keeps it over restarts, so that its peers find it again."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
