"""Joining a Ray that runs, or starting one on this machine."""

import logging
import os
import signal
import socket
import threading
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray._private.utils import read_ray_address

from specahead.config import ClusterSettings
from specahead.config.clock import clock
from specahead.wire.errors import ClusterError

log = logging.getLogger(__name__)


def connect_ray(settings: ClusterSettings) -> TemporaryDirectory[str] | None:
    """Join a running Ray, or start one on loopback; returns the folder of one that was started here.

    In the main thread, SIGTERM raises KeyboardInterrupt afterwards: Ray's own handler prints a stack and aborts.
    """
    with clock("connecting to Ray"):
        folder = _connect(settings)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return folder


def _connect(settings: ClusterSettings) -> TemporaryDirectory[str] | None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 lets whatever else runs there hold up every step
    options: dict[str, Any] = {"namespace": settings.namespace, "log_to_driver": False, "logging_level": "error"}
    asked = settings.ray_address
    address = _running_ray() if asked == "auto" else None if asked == "local" else asked
    if address is not None:
        log.info("joining the running Ray", extra={"address": address})
        check_ray_listens(address)
    if address is None or address.rsplit(":", 1)[0] in ("127.0.0.1", "localhost"):
        _keep_ray_on_loopback()
    if address is not None:
        # By its own name where one was given: Ray takes up its token for a cluster that it finds itself only.
        ray.init(address=asked, **options)
        return None
    log.info("starting Ray on 127.0.0.1")
    # This Ray gets no more nodes. Its autoscaler would print a traceback at a SIGTERM to the whole process group.
    Node.start_monitor = lambda node: None
    folder = TemporaryDirectory(prefix="specahead-", ignore_cleanup_errors=True)
    options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "_temp_dir": folder.name}
    ray.init(address="local", **options)
    return folder


def _running_ray() -> str | None:
    """Return RAY_ADDRESS, or the head's address that `ray start` left on this machine if something listens there."""
    named = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE)
    if named:
        return named
    address = read_ray_address()
    if not address:
        return None
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        return address if probe.connect_ex((host, int(port))) == 0 else None


def check_ray_listens(address: str) -> None:
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
    """Turn clusters off, as on a laptop: Ray would otherwise replace a loopback address by the machine's own.

    The switch is read from the environment at `import ray`; child processes read it again.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
