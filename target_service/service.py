"""The target process: a model, a verifier, and the server that drafts and the orchestrator dial."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.runner import Runner
from engine.step_loop import run_step_loop
from protos import control_pb2_grpc, speculation_pb2_grpc
from sparsity.plan import Plan, PlanError
from target_service.recording import open_recording
from target_service.servicer import ControlServicer, SpeculationServicer
from target_service.verifier import Verifier, VerifierSettings
from wire.errors import Unavailable
from wire.handshake import SideSettings, open_side
from wire.messages import Hello, ServiceStatus
from wire.server import RunningServer, start_server


@dataclass(frozen=True)
class TargetServiceSettings:
    """listen_port 0: any free one. record_reads: file that what sparse rounds read is written to at the end."""

    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    record_reads: str | None = None


@dataclass(frozen=True)
class TargetProcess:
    """All that makes a target process."""

    side: SideSettings
    service: TargetServiceSettings


async def run(process: TargetProcess, on_ready: Callable[[RunningServer], None]) -> None:
    """Load the model, then serve until cancelled. Raises PlanError if the plan is for another target."""
    side = open_side(process.side)
    planned = side.plan.target_layers, side.plan.target_kv_heads
    actual = side.shape.num_layers, side.shape.num_kv_heads
    if planned != actual:
        raise PlanError(
            f"{process.side.plan} is for a target of (layers, KV heads) {planned}, {side.hello.model} has {actual}"
        )
    await serve(process.service, side.runner, side.plan, side.hello, on_ready)


async def serve(
    settings: TargetServiceSettings,
    runner: Runner,
    plan: Plan,
    hello: Hello,
    on_ready: Callable[[RunningServer], None],
) -> None:
    """Runs until cancelled; ends with an exception if a step fails, or if reads cannot be recorded as asked."""
    recording = None if settings.record_reads is None else open_recording(settings.record_reads, runner)
    verifier = Verifier(runner, plan, settings.verifier, recording)
    verifier.warm_up()
    wake = asyncio.Event()
    speculation = SpeculationServicer(verifier, hello, wake)

    def status() -> ServiceStatus:
        return ServiceStatus(
            peer=hello.peer,
            pid=os.getpid(),
            attached=list(speculation.attached),
            refusal=speculation.refusal,
            counters={name: float(value) for name, value in verifier.totals.items()},
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
        if recording is not None:
            recording.save()
        await server.stop(0.5)
