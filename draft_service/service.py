"""The draft process: a model, a drafter, a link to each target, and a small server for health and status."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from draft_service.drafter import Drafter, DrafterSettings
from draft_service.link import LinkState, keep_link
from engine.loading import ModelSettings, open_model
from engine.runner import Runner
from engine.step_loop import run_step_loop
from protos import control_pb2, control_pb2_grpc
from sparsity.plan import Plan, PlanError, load_plan, with_budget
from wire.convert import status_to_pb
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
    """All that makes a draft process. budget: instead of the plan's, if given."""

    model: ModelSettings
    plan: str
    service: DraftServiceSettings
    budget: float | None = None
    name: str = "draft"


async def run(process: DraftProcess, on_ready: Callable[[RunningServer], None]) -> None:
    """Load the model, then serve until cancelled."""
    plan = with_budget(load_plan(process.plan), process.budget)
    opened = open_model(process.model)
    if (plan.draft_layers, plan.draft_heads) != (opened.shape.num_layers, opened.shape.num_heads):
        raise PlanError(
            f"{process.plan} is for a draft of {plan.draft_layers} layers of {plan.draft_heads} heads, "
            f"{process.model.model} has {opened.shape.num_layers} of {opened.shape.num_heads}"
        )
    hello = Hello(
        peer=process.name,
        model=process.model.model,
        vocab_size=opened.shape.vocab_size,
        tokenizer_hash=opened.tokenizer_hash,
        plan_hash=plan.hash,
        gamma=process.service.drafter.gamma,
        block_size=plan.block_size,
    )
    await serve(process.service, opened.runner, plan, hello, on_ready)


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
