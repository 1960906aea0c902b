"""The processes of a run: each is the product's own main, with scripted models and without HTTP and Ray."""

from collections.abc import Callable
from typing import Any

import tokenizers

from draft_service import service as draft_service
from draft_service.drafter import Drafter
from orchestrator.api.grpc_gateway import InferenceServicer
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.service_status import Lines
from orchestrator.cluster.supervision import Supervisor
from orchestrator.requests.records import Limits, max_message
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.observer import Observer
from orchestrator.sessions.router import Router
from protos import inference_pb2_grpc
from specahead.config.access import Timeouts
from specahead.engine.steps.runner import DraftRunner, TargetRunner
from specahead.wire.access import OPEN, PeerAccess
from specahead.wire.messages import Hello
from specahead.wire.server import start_server
from target_service import service as target_service
from tests.settings import draft_settings, target_settings
from tests.simulation.model import PLAN, STOP, VOCAB
from tests.simulation.scenario import Scenario

CONTEXT = 160  # tokens
MODEL = "scripted"
PORT = 7000


def address_of(name: str) -> str:
    """Return the address at which a process listens."""
    return f"{name}:{PORT}"


def _characters() -> tokenizers.Tokenizer:
    """Return a tokenizer of one character for each token id."""
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(65 + token): token for token in range(VOCAB)}))
    characters.decoder = tokenizers.decoders.Fuse()
    return characters


class Tokenizer:
    """Turns token ids into text, a character each."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    backend_tokenizer = _characters()

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(65 + token) for token in tokens)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) - 65 for character in text]


def _hello(side: str, scenario: Scenario, name: str) -> Hello:
    return Hello(name, MODEL, VOCAB, "scripted", PLAN.hash, scenario.gamma, PLAN.block_size)


async def run_target(
    name: str, scenario: Scenario, runner: TargetRunner, draft: DraftRunner | None, keep: Callable[[Drafter], None]
) -> None:
    """Run a target. draft: the model of a draft in its process, or None. keep: called with that draft's drafter."""
    settings = target_settings(
        host=name,
        port=PORT,
        gamma=scenario.gamma_setting,
        max_gamma=scenario.gamma,
        draft=scenario.draft,
        hold=scenario.hold,
        lookup=scenario.lookup,
        max_sessions=scenario.max_sessions,
        max_queued=scenario.max_queued,
        max_context=CONTEXT,
        prefill_chunk=scenario.prefill_chunk,
        timeouts=Timeouts(step=10.0),
        placement="auto" if draft is None else "together",
    )
    drafter = None
    if draft is not None:
        drafter = Drafter(draft, PLAN, settings.own_draft)
        keep(drafter)
    hello = _hello("target", scenario, name)
    await target_service.serve(settings, runner, PLAN, hello, lambda server: None, drafter=drafter)


async def run_draft(name: str, scenario: Scenario, runner: DraftRunner, keep: Callable[[Drafter], None]) -> None:
    """Run a draft service. keep: called with its drafter."""

    def make(*args: Any) -> Drafter:
        drafter = Drafter(*args)
        keep(drafter)
        return drafter

    settings = draft_settings(
        host=name,
        port=PORT,
        targets=tuple(address_of(f"target-{index}") for index in range(scenario.targets)),
        gamma=scenario.gamma_setting,
        max_gamma=scenario.gamma,
        branches=scenario.branches if scenario.ahead else 0,
        max_sessions=scenario.max_sessions,
        max_context=CONTEXT,
        prefill_chunk=scenario.prefill_chunk,
        timeouts=Timeouts(step=10.0),
    )
    hello = _hello("draft", scenario, name)
    parts = draft_service.Parts(drafter=make)
    await draft_service.serve(settings, runner, PLAN, hello, lambda server: None, parts=parts)


async def run_gateway(
    name: str, targets: list[str], scenario: Scenario, services: list[str], placement: Any, keep: Callable[[Any], None]
) -> None:
    """Serve clients over targets, and watch services."""
    directory = Directory({target: address_of(target) for target in targets})
    timeouts = scenario.resume_timeout, scenario.request_timeout
    router = Router(directory, PeerAccess(), *timeouts)
    limits = Limits(MODEL, VOCAB, CONTEXT, [STOP])
    observer = Observer(Metrics(MODEL), Tokenizer())
    frontend = Frontend(router, Tokenizer(), limits, observer, MODEL)
    keep(frontend)
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    inference = (add, InferenceServicer(frontend), "specahead.v1.Inference")
    async with router.connected_to_targets():
        server = await start_server(name, PORT, [inference], OPEN, max_message(limits))
        await server.set_serving(True)
        watched = Directory({service: address_of(service) for service in services})
        await Supervisor(Lines([watched], PeerAccess()), placement, watched.put).run()
