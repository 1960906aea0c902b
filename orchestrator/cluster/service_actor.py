"""The process that Ray runs for a service: it serves where Ray has started it, and says where that is."""

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import ray
import uvloop

from specahead.config import DraftSettings, TargetSettings
from specahead.config.logs import Recorder, Said, configure_logs
from specahead.config.process import prepare_process
from specahead.wire.server import RunningServer

log = logging.getLogger(__name__)


class ServiceActor:
    """Hosts one service in its own process. If the service fails, so does the process, and Ray restarts it.

    Only where it fails before it ever served, `where` says why instead. If the raylet that started the process dies,
    the process ends, too: nobody would watch it, and its port may be needed by the service that is placed anew.

    settings: with an empty host the service binds the address of Ray's node. neighbours: how many services share the
    cores of a node, this one included.
    """

    def __init__(self, settings: DraftSettings | TargetSettings, neighbours: int) -> None:
        prepare_process()
        node = ray.util.get_node_ip_address()
        self._node = f"[{node}]" if ":" in node else node
        self._listening: Future[tuple[str, int]] = Future()
        configure_logs(settings)
        self._said = Recorder()
        logging.getLogger().addHandler(self._said)
        if (nice := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
            log.warning(
                "Ray gives services the low priority %d, so that whatever else runs on this node holds up every step; "
                "give its `ray start` the variable RAY_worker_niceness=0",
                nice,
            )
        self._served_before = ray.get_runtime_context().was_current_actor_reconstructed
        threads = share_of_cores(neighbours)
        settings = replace(settings, host=settings.host or self._node, threads=threads)
        threading.Thread(target=_end_with_parent, name="raylet", daemon=True).start()
        threading.Thread(target=self._run, args=(settings,), name="service", daemon=True).start()

    def _run(self, settings: DraftSettings | TargetSettings) -> None:
        def on_ready(server: RunningServer) -> None:
            self._listening.set_result((announced_address(server.address, self._node), os.getpid()))

        try:
            # These large imports come after prepare_process.
            if isinstance(settings, DraftSettings):
                from draft_service.service import run as run_draft

                uvloop.run(run_draft(settings, on_ready))
            else:
                from target_service.service import run as run_target

                uvloop.run(run_target(settings, on_ready))
        except BaseException as error:
            served = self._listening.done() or self._served_before
            said = isinstance(error, ValueError | OSError)  # then its text is meant for a person, and `where` raises it
            if served or not said:
                log.exception("the %s service failed", settings.name or settings.side)
            if served:  # let Ray start it anew
                os._exit(1)
            self._listening.set_exception(RuntimeError(f"{error}" if said else f"{type(error).__name__}: {error}"))

    def where(self) -> tuple[str, int]:
        """Wait for the service to listen and return its address and process id. Raises its error if it fails."""
        return self._listening.result()

    def said(self) -> list[Said]:
        """Return the service's log messages since the last call."""
        return self._said.take()


def announced_address(bound: str, node: str) -> str:
    """Return where others reach a service that is bound to HOST:PORT: the node's address if HOST is all addresses."""
    host, _, port = bound.rpartition(":")
    return f"{node}:{port}" if host in ("0.0.0.0", "::", "[::]") else bound


def share_of_cores(neighbours: int) -> int:
    """Return the threads of each of the services on this node, so that together they use all its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // neighbours)


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    log.error("the raylet of this service is gone, so the service ends")
    os._exit(1)
