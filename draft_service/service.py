"""The draft process: a model, a drafter, a link to each target, and a small server for health and status."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from draft_service.drafter import Drafter, DrafterSettings
from draft_service.link import LinkState, keep_link
from engine.runner import Runner
from engine.step_loop import run_step_loop
from protos import control_pb2, control_pb2_grpc
from sparsity.plan import Plan, PlanError
from wire.convert import status_to_pb
from wire.handshake import SideSettings, open_side
from wire.messages import Hello, ServiceStatus
from wire.server import RunningServer, start_server


@dataclass(frozen=True)
class DraftServiceSettings:
    """targets: addresses to dial. listen_port 0: any free one."""

    targets: list[str]
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    drafter: DrafterSettings = field(default_factory=DrafterSettings)


@dataclass(frozen=True)
class DraftProcess:
    """All that makes a draft process."""

    side: SideSettings
    service: DraftServiceSettings


async def run(process: DraftProcess, on_ready: Callable[[RunningServer], None]) -> None:
    """Load the model, then serve until cancelled. Raises PlanError if the plan is for another draft."""
    side = open_side(process.side)
    planned, actual = (
        (side.plan.draft_layers, side.plan.draft_heads),
        (side.shape.num_layers, side.shape.num_heads),
    )
    if planned != actual:
        raise PlanError(
            f"{process.side.plan} is for a draft of (layers, heads) {planned}, {side.hello.model} has {actual}"
        )
    await serve(process.service, side.runner, side.plan, side.hello, on_ready)


class _Control(control_pb2_grpc.DraftControlServicer):
    def __init__(self, read_status: Callable[[], ServiceStatus]) -> None:
        self._read_status = read_status

    async def Status(self, request: Any, context: Any) -> control_pb2.ServiceStatus:
        return status_to_pb(self._read_status())


async def serve(
    settings: DraftServiceSettings,
    runner: Runner,
    plan: Plan,
    hello: Hello,
    on_ready: Callable[[RunningServer], None],
) -> None:
    """Runs until cancelled; ends with an exception if a step fails."""
    drafter = Drafter(runner, plan, settings.drafter)
    runner.warm_up_rounds(settings.drafter.warm_sessions)
    links = [LinkState(target) for target in settings.targets]
    wake = asyncio.Event()

    def status() -> ServiceStatus:
        return ServiceStatus(
            peer=hello.peer,
            pid=os.getpid(),
            attached=[link.attached for link in links if link.attached],
            refusal="; ".join(link.refusal for link in links if link.refusal),
            counters={name: float(value) for name, value in drafter.counters.items()},
            gauges={
                "pid": os.getpid(),
                "sessions": drafter.session_count,
                "kv_pages_held": runner.kv.pool.held,
            },
        )

    add = control_pb2_grpc.add_DraftControlServicer_to_server
    server = await start_server(
        settings.listen_host, settings.listen_port, [(add, _Control(status), "specahead.v1.DraftControl")]
    )
    await server.set_serving(True)
    on_ready(server)
    try:
        async with asyncio.TaskGroup() as tasks:
            for link in links:
                tasks.create_task(keep_link(link, hello, drafter, wake))
            tasks.create_task(
                run_step_loop(drafter.plan_step, drafter.execute, drafter.finish_step, wake, lambda: None)
            )
    finally:
        await server.stop(0)
