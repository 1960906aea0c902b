"""`python -m orchestrator.launch`: place the services, open the client endpoints, run until told to stop."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

from config import Config, SettingsError, resolve_launch
from engine.kv.pages import PAGE_SIZE
from engine.loading.shape import load_shape
from engine.loading.tokenizer import count_token_ids, load_generation_config, load_tokenizer, stop_token_ids
from orchestrator.connection_limits import Connections
from orchestrator.generation import Frontend
from orchestrator.grpc_gateway import InferenceServicer
from orchestrator.http_gateway import StatusReader, make_app, serve_http
from orchestrator.metrics import Metrics
from orchestrator.records import Limits, max_message
from orchestrator.replies import find_format
from orchestrator.router import Router
from orchestrator.service_status import AskStatus, read_statuses, services_at
from orchestrator.supervision import Placement, supervise
from protos import inference_pb2_grpc
from sparsity.methods import methods_of
from sparsity.plan import PlanError, load_plan
from wire.errors import ClusterError
from wire.messages import ServiceStatus
from wire.server import check_free, start_server
from wire.streams import run_together

log = logging.getLogger(__name__)

_ATTACH_SECONDS = 30.0


def resolve_context(config: Config) -> Config:
    """Fill max_context in from the models, and refuse more than they allow."""
    target, draft = config.target, config.draft
    allowed = min(load_shape(side.model).max_position_embeddings for side in (target, draft))
    if target.max_context > allowed:
        raise SettingsError(f"max_context {target.max_context}: the models allow {allowed} tokens")
    room = allowed
    if target.kv_tokens:
        room = min(allowed, target.kv_tokens - 2 * (target.gamma + 1) - 16)
    context = target.max_context or room
    return replace(config, target=replace(target, max_context=context), draft=replace(draft, max_context=context))


@contextlib.asynccontextmanager
async def serve_clients(
    config: Config, target: str, services: Mapping[str, AskStatus]
) -> AsyncIterator[tuple[str, str]]:
    """The client endpoints over services (gRPC, HTTP); drained and closed at the end.

    target: the target's address. services: how each is asked for its status, by side.

    Raises ClusterError if the services do not find each other, OSError for an address that cannot be bound.
    """
    clients, model = config.clients, config.target.model
    tokenizer = load_tokenizer(model)
    generation = load_generation_config(model)
    defaults = generation if clients.generation_config == "auto" else {}
    limits = Limits(
        config.model_name,
        min(load_shape(model).vocab_size, count_token_ids(tokenizer)),
        config.target.max_context,
        stop_token_ids(generation, tokenizer),
        tuple(methods_of(load_plan(config.target.plan))),
        temperature=defaults.get("temperature", 1.0),
        top_p=defaults.get("top_p", 1.0),
    )
    router = Router(target, clients.resume_timeout, clients.request_timeout)
    metrics = Metrics(limits.model_name)
    reply_format = find_format(tokenizer, clients.tool_call_parser, clients.reasoning_parser)
    frontend = Frontend(router, tokenizer, limits, metrics, config.draft.model, reply_format)
    async with contextlib.AsyncExitStack() as started:

        async def read_status() -> Mapping[str, ServiceStatus | None]:
            return await read_statuses(services)

        await started.enter_async_context(router.connected_to_target())
        servicer = InferenceServicer(frontend)
        add = inference_pb2_grpc.add_InferenceServicer_to_server
        server = await start_server(
            clients.host, clients.grpc_port, [(add, servicer, "specahead.v1.Inference")], max_message(limits)
        )
        started.push_async_callback(server.stop, 1.0)
        http = serve_http(
            make_app(frontend, read_status),
            clients.host,
            clients.http_port,
            Connections.within_open_files(clients.max_connections),
        )
        http_address = await started.enter_async_context(http)
        await server.set_serving(True)
        try:
            status = await _wait_until_connected(router, read_status, "draft" in services)
            room = round(status.gauges.get("kv_pages", 0)) * PAGE_SIZE - config.target.gamma - 1
            frontend.limits = replace(limits, kv_tokens=max(room, 0))
            yield server.address, http_address
        finally:
            await server.set_serving(False)
            await frontend.drain(clients.shutdown_grace)


async def _wait_until_connected(router: Router, read_status: StatusReader, with_draft: bool) -> ServiceStatus:
    """Wait until the target serves and, if asked for, a draft is attached, and return the target's status.

    Raises ClusterError if the draft is refused.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ATTACH_SECONDS
    while True:
        status = (await read_status())["target"]
        if status and router.connected and (status.attached or not with_draft):
            return status
        if status and with_draft and status.refusal and not status.attached:
            raise ClusterError(status.refusal)
        if loop.time() > deadline:
            what = "draft and target did" if with_draft else "the target did"
            raise ClusterError(f"{what} not connect within {_ATTACH_SECONDS:.0f} s")
        await asyncio.sleep(0.05)


async def run(config: Config, target: str, draft: str, placement: Placement | None = None) -> None:
    """Serve clients over the services at these addresses until SIGINT or SIGTERM.

    placement: what placed the services and keeps them; None if they are others' affair. Raises ClusterError if they are
    lost for good, beside what `serve_clients` raises.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def listen_for_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)

    listen_for_signals()
    async with (
        services_at({"target": target, "draft": draft}) as services,
        serve_clients(config, target, services) as (grpc_address, http_address),
    ):
        print(f"gRPC endpoint: {grpc_address}")
        print(f"HTTP endpoint: {http_address}")
        print("ready", flush=True)
        watching = [] if placement is None else [supervise(services, placement, listen_for_signals)]
        await run_together(_wait_for(stop), *watching)
        print("stopping: requests in flight are given time to finish", flush=True)


def check_addresses(config: Config) -> None:
    """Raise OSError for an address of this launch that something else listens on."""
    listening = [(config.clients.host, config.clients.grpc_port), (config.clients.host, config.clients.http_port)]
    if not config.cluster.target_address:
        listening += [(side.host, side.port) for side in (config.target, config.draft)]
    for host, port in listening:
        check_free(host, port)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.contextmanager
def placed_services(config: Config) -> Iterator[tuple[str, str, Placement | None]]:
    """Addresses of target and draft, and what keeps them: those that run already, or new ones on Ray."""
    if config.cluster.target_address:
        yield config.cluster.target_address, config.cluster.draft_address, None
        return
    from orchestrator.cluster import placement_on_ray  # a launch over running services needs no Ray

    with placement_on_ray(config) as placement:
        own = placement.owns_ray
        print("no running Ray was found: started one on 127.0.0.1" if own else "joined the running Ray", flush=True)
        placement.start()
        for name, (address, pid) in placement.services.items():
            print(f"{name} service: pid {pid}, {address}", flush=True)
        yield placement.services["target"][0], placement.services["draft"][0], placement


def _fail(error: Exception) -> NoReturn:
    """Exit with one line; what Hugging Face says has more."""
    sys.exit(f"error: {' '.join(str(error).split())}")


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Of two services that cannot start, one is told of; Ray would print the other one's traceback.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        config = resolve_context(resolve_launch(sys.argv[1:], os.environ))
    except (ValueError, OSError, NotImplementedError) as error:
        _fail(error)
    try:
        check_addresses(config)
        with placed_services(config) as placed:
            asyncio.run(run(config, *placed))
    except (ClusterError, PlanError, OSError) as error:
        _fail(error)


if __name__ == "__main__":
    main()
