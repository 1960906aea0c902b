"""The target process: a model, a verifier, and the server that drafts and the orchestrator dial."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.loading import ModelSettings, open_model
from engine.runner import Runner
from engine.step_loop import run_step_loop
from protos import control_pb2_grpc, speculation_pb2_grpc
from sparsity.plan import Plan, PlanError, load_plan, with_budget
from target_service.servicer import ControlServicer, SpeculationServicer
from target_service.verifier import Verifier, VerifierSettings
from wire.errors import Unavailable
from wire.messages import Hello, ServiceStatus
from wire.server import RunningServer, start_server


@dataclass(frozen=True)
class TargetServiceSettings:
    """listen_port 0: any free one."""

    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    verifier: VerifierSettings = field(default_factory=VerifierSettings)


@dataclass(frozen=True)
class TargetProcess:
    """All that makes a target process. budget: instead of the plan's, if given."""

    model: ModelSettings
    plan: str
    service: TargetServiceSettings
    budget: float | None = None
    name: str = "target"


async def run(process: TargetProcess, on_ready: Callable[[RunningServer], None]) -> None:
    """Load the model, then serve until cancelled."""
    plan = with_budget(load_plan(process.plan), process.budget)
    opened = open_model(process.model)
    if (plan.target_layers, plan.target_kv_heads) != (opened.shape.num_layers, opened.shape.num_kv_heads):
        raise PlanError(
            f"{process.plan} is for a target of {plan.target_layers} layers of {plan.target_kv_heads} KV heads, "
            f"{process.model.model} has {opened.shape.num_layers} of {opened.shape.num_kv_heads}"
        )
    hello = Hello(
        peer=process.name,
        model=process.model.model,
        vocab_size=opened.shape.vocab_size,
        tokenizer_hash=opened.tokenizer_hash,
        plan_hash=plan.hash,
        gamma=process.service.verifier.gamma,
        block_size=plan.block_size,
    )
    await serve(process.service, opened.runner, plan, hello, on_ready)


async def serve(
    settings: TargetServiceSettings,
    runner: Runner,
    plan: Plan,
    hello: Hello,
    on_ready: Callable[[RunningServer], None],
) -> None:
    """Runs until cancelled; ends with an exception if a step fails."""
    verifier = Verifier(runner, plan, settings.verifier)
    wake = asyncio.Event()
    speculation = SpeculationServicer(verifier, hello, wake)

    def status() -> ServiceStatus:
        return ServiceStatus(
            peer=hello.peer,
            pid=os.getpid(),
            attached=list(speculation.attached),
            refusal=speculation.refusal,
            counters={name: float(value) for name, value in verifier.counters.items()},
            gauges=verifier.gauges | {"pid": os.getpid()},
        )

    control = ControlServicer(verifier, wake, status)
    server = await start_server(
        settings.listen_host,
        settings.listen_port,
        [
            (speculation_pb2_grpc.add_SpeculationServicer_to_server, speculation, "specahead.v1.Speculation"),
            (control_pb2_grpc.add_TargetControlServicer_to_server, control, "specahead.v1.TargetControl"),
        ],
    )
    await server.set_serving(True)
    on_ready(server)
    try:
        await run_step_loop(
            verifier.plan_step, verifier.execute, verifier.finish_step, wake, verifier.next_deadline
        )
    finally:
        verifier.close_all(Unavailable("the target is stopping"))
        await server.stop(0.5)
