"""The draft process: a model, a drafter, a link to each target, and a small server for health and status."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draft_service.drafter import Drafter
from draft_service.hello import draft_hello
from draft_service.link import Links, keep_link
from protos import control_pb2, control_pb2_grpc
from specahead.config import DraftSettings
from specahead.config.garbage import keep_loaded
from specahead.config.version import running_version
from specahead.engine.loading.copies import choose_copies
from specahead.engine.loading.model import default_device
from specahead.engine.loading.opening import open_model
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.steps.runner import DraftRunner
from specahead.engine.steps.step_loop import Steps, preparation_of, run_step_loop
from specahead.kernels.compiling import end_compiling
from specahead.sparsity.plan import Plan
from specahead.sparsity.served_plan import load_served_plan
from specahead.wire.access import read_peer_access
from specahead.wire.convert import status_to_pb
from specahead.wire.messages import Hello, ServiceStatus
from specahead.wire.server import RunningServer, check_free, start_server

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a draft is put together from. Tests and benchmarks replace parts; services run with the defaults."""

    drafter: Callable[..., Drafter] = Drafter
    """Makes the drafter."""
    steps: Callable[[Drafter], Steps] = lambda drafter: drafter
    """Makes the object that the step loop drives."""
    keep_link: Callable[..., Coroutine[Any, Any, None]] = keep_link
    """Keeps the link to a target, as the function of this name does."""


DEFAULT_PARTS = Parts()


async def run(settings: DraftSettings, on_ready: Callable[[RunningServer], None], parts: Parts = DEFAULT_PARTS) -> None:
    """Load the model, then serve until cancelled.

    Raises PlanError if the plan is for another draft, OSError or the loader's own error for a model that cannot be
    loaded.
    """
    check_free(settings.host, settings.port)
    if settings.device == "auto":
        settings = replace(settings, device=default_device())
    settings = choose_copies(settings)
    plan = load_served_plan(settings.plan_file, settings.budget, *settings.pair)
    log.info("loading the model", extra={"model": settings.model})
    opened = open_model(settings, "all" if settings.speculation.draft_quantization == "fp8" else "none")
    hello = draft_hello(settings, plan, opened)
    if not settings.max_context:
        settings = replace(settings, max_context=opened.shape.max_position_embeddings)
    keep_loaded()  # frees the garbage of loading, before graphs take memory
    await serve(settings, opened.runner, plan, hello, on_ready, opened.grammars, parts)


class _Control(control_pb2_grpc.DraftControlServicer):
    def __init__(self, read_status: Callable[[], ServiceStatus], set_targets: Callable[[Iterable[str]], None]) -> None:
        self._read_status, self._set_targets = read_status, set_targets

    async def Status(self, request: Any, context: Any) -> control_pb2.ServiceStatus:
        return status_to_pb(self._read_status())

    async def SetTargets(self, request: control_pb2.Targets, context: Any) -> control_pb2.TargetsSet:
        self._set_targets(request.addresses)
        return control_pb2.TargetsSet()


def _status(hello: Hello, drafter: Drafter, links: Links) -> ServiceStatus:
    kv = drafter.runner.kv
    return ServiceStatus(
        peer=hello.peer,
        pid=os.getpid(),
        attached=[link.attached for link in links.states if link.attached],
        refusal="; ".join(link.refusal for link in links.states if link.refusal),
        counters={name: float(value) for name, value in drafter.counters.items()},
        gauges={
            "pid": os.getpid(),
            "sessions": drafter.session_count,
            "kv_pages_held": kv.pool.held,
            "kv_pages": kv.pool.num_pages,
            "unprepared_steps": drafter.runner.unprepared,
        },
        version=running_version(),
    )


async def serve(
    settings: DraftSettings,
    runner: DraftRunner,
    plan: Plan,
    hello: Hello,
    on_ready: Callable[[RunningServer], None],
    grammars: Grammars | None = None,
    parts: Parts = DEFAULT_PARTS,
) -> None:
    """Serve until cancelled.

    on_ready: called once the server listens. grammars: compiles the grammars of sessions; None declines sessions with
    one. Raises the errors of `run_step_loop`.
    """
    drafter = parts.drafter(runner, plan, settings, grammars)
    log.info("preparing the rounds", extra={"sessions": settings.max_sessions})
    drafter.warm_up()
    end_compiling()
    keep_loaded()
    wake = asyncio.Event()
    access = read_peer_access(settings)
    links = Links(lambda state: parts.keep_link(state, access, hello, drafter, wake))
    if grammars is not None:
        grammars.on_compiled = partial(asyncio.get_running_loop().call_soon_threadsafe, wake.set)

    add = control_pb2_grpc.add_DraftControlServicer_to_server
    control = _Control(partial(_status, hello, drafter, links), links.set_targets)
    services = [(add, control, "specahead.v1.DraftControl")]
    server = await start_server(settings.host, settings.port, services, access.guard())
    await server.set_serving(True)
    log.info("serving", extra={"address": server.address, "tls": settings.service_tls.cert != "", "pid": os.getpid()})
    on_ready(server)
    links.set_targets(settings.targets)
    try:
        await run_step_loop(
            parts.steps(drafter),
            wake,
            settings.timeouts.step,
            warm_up_more=lambda: preparation_of([runner], keep_loaded) if drafter.is_idle else None,
        )
    finally:
        await links.close()
        await server.stop(0)
