"""The target process: a model, a verifier, and the server that drafts and the orchestrator connect to."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from draft_service.drafter import Drafter
from draft_service.hello import draft_hello
from protos import control_pb2_grpc, speculation_pb2_grpc
from specahead.config import TargetSettings
from specahead.config.garbage import keep_loaded
from specahead.config.version import running_version
from specahead.engine.loading.config import load_config, load_shape
from specahead.engine.loading.copies import choose_copies
from specahead.engine.loading.model import default_device
from specahead.engine.loading.opening import EightBit, OpenedModel, open_both, open_model, open_with_head
from specahead.engine.model.head_config import is_head
from specahead.engine.parallel.processes import RankProcesses
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.steps.runner import TargetRunner
from specahead.engine.steps.step_loop import Steps, preparation_of, run_step_loop
from specahead.kernels.compiling import end_compiling
from specahead.sparsity.plan import Plan, PlanError
from specahead.sparsity.served_plan import load_served_plan
from specahead.wire.access import read_peer_access
from specahead.wire.errors import Unavailable
from specahead.wire.handshake import make_hello
from specahead.wire.messages import Hello, ServiceStatus
from specahead.wire.server import RunningServer, check_free, start_server
from target_service.draft_in_target import StepsByTurns
from target_service.hooks import NO_HOOKS, Hooks
from target_service.servicer import ControlServicer, SpeculationServicer
from target_service.verifier import Verifier

log = logging.getLogger(__name__)

UNCALIBRATED = (
    "this pair has no calibrated plan: approximate requests read everything, or the stated --budget by a plan that the "
    "models' sizes give, which loses more quality; make one with `specahead calibrate` and pass it as --plan"
)

OpenedPair = tuple[OpenedModel, OpenedModel | None]


def open_models(settings: TargetSettings, group_size: int) -> OpenedPair:
    """Open the target's model, and the draft's if it runs in this process.

    group_size: of the plan. Raises OSError, or the loader's own error, for a model that cannot be loaded, and
    NotImplementedError for a head beside a target or settings that are not built with heads.
    """
    planned, eight_bit = replace(settings, group_size=group_size), _eight_bit(settings)
    has_head = drafts_by_head(settings)
    if has_head:
        _check_head(settings)

    def open_part(ranks: Ranks, meet: Callable[[], None]) -> OpenedPair:
        if has_head:
            return open_with_head(planned, settings.own_draft, eight_bit, ranks, meet)
        if not settings.draft_in_target:
            return open_model(planned, eight_bit, ranks, meet), None
        of_draft: EightBit = "all" if settings.speculation.draft_quantization == "fp8" else "none"
        return open_both(planned, settings.own_draft, eight_bit, of_draft, ranks, meet)

    if settings.tensor_parallel_size == 1:
        return open_part(ALONE, lambda: None)
    return RankProcesses(planned, eight_bit).open(open_part)


def drafts_by_head(settings: TargetSettings) -> bool:
    """Return whether a head drafts in the target's process, on the target's hidden states."""
    return settings.draft_in_target and is_head(load_config(settings.draft))


def _check_head(settings: TargetSettings) -> None:
    """Raise NotImplementedError for settings that are not built with a head."""
    refused = {
        "a target that chooses blocks by itself": load_shape(settings.model).chooses_blocks,
        "a speculation with draft_quantization fp8": settings.speculation.draft_quantization == "fp8",
    }
    for what in (what for what, given in refused.items() if given):
        raise NotImplementedError(f"{settings.draft} is a head, which is not built with {what}: leave one of them out")


def make_steps(verifier: Verifier, drafter: Drafter | None) -> Steps:
    """Return the steps of a target: its own, or its own and its draft's by turns."""
    return verifier if drafter is None else StepsByTurns(verifier, drafter)


@dataclass(frozen=True)
class Parts:
    """What a target is put together from. Tests and benchmarks replace parts; services run with the defaults."""

    hooks: Hooks = NO_HOOKS
    """Replace or watch single things in the verifier."""
    drafter: Callable[..., Drafter] = Drafter
    """Makes the drafter of a draft that runs in this process."""
    steps: Callable[[Verifier, Drafter | None], Steps] = make_steps
    """Makes the object that the step loop drives."""


DEFAULT_PARTS = Parts()


async def run(
    settings: TargetSettings, on_ready: Callable[[RunningServer], None], parts: Parts = DEFAULT_PARTS
) -> None:
    """Load the models, then serve until cancelled.

    Raises PlanError if the plan is for another target, OSError or the loader's own error for a model that cannot be
    loaded, OSError for an address in use, and the errors of `serve`.
    """
    check_free(settings.host, settings.port)
    if settings.device == "auto":
        settings = replace(settings, device=default_device())
    chooses_blocks = load_shape(settings.model).chooses_blocks
    settings = choose_copies(_of_choosing_model(settings) if chooses_blocks else settings)
    plan = load_served_plan(settings.plan_file, settings.budget, *settings.pair)
    if chooses_blocks and plan.sparse_layers:
        raise PlanError(f"{settings.plan}: {settings.model} chooses blocks by itself, and takes no plan: leave it out")
    for warning in _warnings_of(settings, plan, chooses_blocks):
        log.warning(warning)
    log.info("loading the model", extra={"model": settings.model})
    opened, beside = open_models(settings, plan.group_size)
    hello = make_hello(settings, plan, opened.shape.vocab_size, opened.tokenizer_hash)
    _check_fits(settings, plan, opened, beside, hello)
    if not settings.max_context:
        settings = replace(settings, max_context=opened.shape.max_position_embeddings)
    keep_loaded()  # frees the garbage of loading, before graphs take memory
    drafter = None if beside is None else parts.drafter(beside.runner, plan, settings.own_draft, beside.grammars)
    await serve(settings, opened.runner, plan, hello, on_ready, opened.grammars, drafter, parts)


def _warnings_of(settings: TargetSettings, plan: Plan, chooses_blocks: bool) -> Iterator[str]:
    """Yield what a plan costs these settings. chooses_blocks: whether the target's own attention does."""
    if chooses_blocks:
        return
    if not plan.is_calibrated and settings.has_draft and not drafts_by_head(settings):
        yield UNCALIBRATED
    if plan.dense_layers and settings.host_kv_memory:
        yield "the plan reads layers wholly: with --host-kv-memory each step brings whole sequences to the GPU"


def _check_fits(
    settings: TargetSettings, plan: Plan, opened: OpenedModel, beside: OpenedModel | None, hello: Hello
) -> None:
    """Raise PlanError if the plan is for another target, or if a draft in this process does not fit the target."""
    planned = plan.target_layers, plan.target_kv_heads
    actual = opened.shape.num_layers, opened.shape.num_kv_heads
    if planned != actual:
        raise PlanError(
            f"{settings.plan} is for a target of (layers, KV heads) {planned}, {settings.model} has {actual}"
        )
    if beside is None or drafts_by_head(settings):
        return
    if mismatch := draft_hello(settings.own_draft, plan, beside).mismatch(hello):
        raise PlanError(f"draft and target do not fit: {mismatch}")


def _of_choosing_model(settings: TargetSettings) -> TargetSettings:
    """Return the settings of a target whose own attention chooses blocks: nothing else chooses what it reads.

    Raises NotImplementedError for settings that would.
    """
    asked = {
        "draft self": settings.draft == "self",
        "speculation hold": bool(settings.speculation.hold),
        "budget": settings.budget > 0,
    }
    for setting in (name for name, given in asked.items() if given):
        raise NotImplementedError(
            f"{settings.model}: {setting} is not built for a model that chooses blocks by itself: leave it out"
        )
    draft = "lookup" if settings.draft == "auto" else settings.draft
    return replace(settings, draft=draft, speculation=replace(settings.speculation, hold=0))


def _eight_bit(settings: TargetSettings) -> EightBit:
    """Return which passes of the target read its weights in 8 bits: its own drafting and screening ones, or none."""
    drafts = settings.drafts_for_itself and settings.speculation.draft_quantization == "fp8"
    return "drafting" if drafts or settings.screens_lightly else "none"


def _status(
    verifier: Verifier, drafter: Drafter | None, hello: Hello, speculation: SpeculationServicer
) -> ServiceStatus:
    unprepared = verifier.runner.unprepared + (0 if drafter is None else drafter.runner.unprepared)
    return ServiceStatus(
        peer=hello.peer,
        pid=os.getpid(),
        attached=[draft.name for draft in verifier.protocol.drafts],
        refusal=speculation.refusal,
        counters={name: float(value) for name, value in verifier.totals.items()},
        gauges=verifier.gauges | {"pid": os.getpid(), "unprepared_steps": unprepared},
        version=running_version(),
    )


def _next_preparation(verifier: Verifier, drafter: Drafter | None) -> Callable[[], None] | None:
    """Return a function that captures one more kind of step; None if all are captured or there are sessions."""
    if not verifier.is_idle or not (drafter is None or drafter.is_idle):
        return None
    return preparation_of([verifier.runner] if drafter is None else [verifier.runner, drafter.runner], keep_loaded)


async def serve(
    settings: TargetSettings,
    runner: TargetRunner,
    plan: Plan,
    hello: Hello,
    on_ready: Callable[[RunningServer], None],
    grammars: Grammars | None = None,
    drafter: Drafter | None = None,
    parts: Parts = DEFAULT_PARTS,
) -> None:
    """Serve until cancelled.

    on_ready: called once the server listens. grammars: compiles the grammars of sessions; None refuses them. drafter:
    drafts in this process; None leaves drafting to draft services.

    Raises the error of a step after which the process cannot go on (specahead.engine.steps.step_loop), and OSError for
    an address that cannot be bound.
    """
    verifier = Verifier(runner, plan, settings, parts.hooks, grammars)
    log.info("preparing the steps", extra={"sessions": settings.max_sessions})
    steps = parts.steps(verifier, drafter)  # before the capture, since some steps are chained to drafted rounds
    verifier.warm_up()
    if drafter is not None:
        drafter.warm_up()
    end_compiling()
    keep_loaded()
    wake = asyncio.Event()
    for compiler in (grammars, None if drafter is None else drafter.admission.grammars):
        if compiler is not None:
            compiler.on_compiled = partial(asyncio.get_running_loop().call_soon_threadsafe, wake.set)
    speculation = SpeculationServicer(verifier, hello, wake)
    control = ControlServicer(verifier, wake, partial(_status, verifier, drafter, hello, speculation))
    services = [
        (speculation_pb2_grpc.add_SpeculationServicer_to_server, speculation, "specahead.v1.Speculation"),
        (control_pb2_grpc.add_TargetControlServicer_to_server, control, "specahead.v1.TargetControl"),
    ]
    server = await start_server(settings.host, settings.port, services, read_peer_access(settings).guard())
    await server.set_serving(True)
    log.info("serving", extra={"address": server.address, "tls": settings.service_tls.cert != "", "pid": os.getpid()})
    on_ready(server)
    try:
        await run_step_loop(
            steps,
            wake,
            settings.timeouts.step,
            sends_first=False,  # drafts have drafted the next round already
            # A rank may be waiting for a pass that failed here: the ranks are out of step, and end together.
            survives_failures=settings.tensor_parallel_size == 1,
            warm_up_more=partial(_next_preparation, verifier, drafter),
        )
    finally:
        verifier.close_all(Unavailable("the target is stopping"))
        await server.stop(0.5)
