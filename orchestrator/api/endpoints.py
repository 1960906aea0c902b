"""The client endpoints over running services: they start, serve until a signal, and stop."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.api.grpc_gateway import InferenceServicer
from orchestrator.api.http_gateway import make_app
from orchestrator.api.http_requests import GuardedHttp, allow_origins, hosts_of, open_paths
from orchestrator.api.http_server import Connections, serve_http
from orchestrator.api.welcome import welcome
from orchestrator.cluster.autoscaling import Autoscaler
from orchestrator.cluster.connecting import wait_until_connected
from orchestrator.cluster.directory import side_of
from orchestrator.cluster.placement import Directories, Look, addresses_in, keep_found
from orchestrator.cluster.service_status import ControlLine, Lines, keep_drafts_informed, read_statuses
from orchestrator.cluster.supervision import Supervisor
from orchestrator.requests.access import Access
from orchestrator.requests.keys import watch_keys
from orchestrator.requests.records import Limits, default_sampling, max_message
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.observer import Observer
from orchestrator.sessions.response_store import ResponseStore
from orchestrator.sessions.router import Router
from orchestrator.sessions.tracing import tracing
from orchestrator.text.replies import find_format
from protos import inference_pb2_grpc
from specahead.config import Config, SettingsError
from specahead.config.garbage import keep_loaded
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.loading.config import load_config, load_shape
from specahead.engine.loading.tokenizer import count_token_ids, load_generation_config, load_tokenizer, stop_token_ids
from specahead.engine.model.head_config import is_head
from specahead.sparsity.served_plan import load_served_plan
from specahead.wire.access import Guard
from specahead.wire.server import start_server
from specahead.wire.tasks import meanwhile, run_together

if TYPE_CHECKING:
    from orchestrator.cluster.fleet import RayPlacement

log = logging.getLogger(__name__)


def resolve_context(config: Config) -> Config:
    """Return the settings with max_model_len from the models. Raises SettingsError for more than these allow."""
    target, draft = config.target, config.draft
    models = [target.model]
    if draft.has_draft and not is_head(load_config(draft.model)):  # a head reads as far as its target
        models.append(draft.model)
    allowed = min(load_shape(model).max_position_embeddings for model in models)
    if target.max_context > allowed:
        raise SettingsError(f"max_model_len {target.max_context}: the models allow {allowed} tokens")
    room = allowed
    if target.kv_tokens:
        room = min(allowed, target.kv_tokens - 2 * (target.most_drafted + 1) - 16)
    context = target.max_context or room
    return replace(config, target=replace(target, max_context=context), draft=replace(draft, max_context=context))


@contextlib.asynccontextmanager
async def serve_clients(
    config: Config, access: Access, directories: Directories, services: Mapping[str, ControlLine]
) -> AsyncIterator[tuple[str, str, Frontend]]:
    """Serve clients while the context lasts; yield the addresses of gRPC and HTTP, and the frontend. Requests are
    drained at the end.

    directories: where the services are, by side. services: how each is called, by name. Raises ClusterError if the
    services do not find each other, OSError for an address that cannot be bound.
    """
    clients, times = config.clients, config.clients.timeouts
    read_addresses = partial(addresses_in, directories)
    async with contextlib.AsyncExitStack() as started:
        tracer = started.enter_context(tracing(clients.logging.trace_share))
        router = Router(directories["target"], access.peers, times.resume, times.request)
        frontend = make_frontend(config, router, tracer)
        await started.enter_async_context(router.connected_to_targets())
        add = inference_pb2_grpc.add_InferenceServicer_to_server
        inference = (add, InferenceServicer(frontend, access.locate_call), "specahead.v1.Inference")
        guard = Guard(access.callers.admit, access.client_tls, frontend.observer.report)
        server = await start_server(clients.host, clients.grpc_port, [inference], guard, max_message(frontend.limits))
        started.push_async_callback(server.stop, 1.0)
        connections = Connections.within_open_files(clients.http.max_connections, access.proxies)
        responses, kept = None, clients.http
        if kept.response_store:
            responses = ResponseStore(kept.response_store, 3600 * kept.response_hours, kept.response_gib * 2**30)
            started.callback(responses.close)
        app = make_app(frontend, partial(read_statuses, services), read_addresses, responses)
        hosts = hosts_of(clients.host, clients.http.allowed_hosts)
        guarded = GuardedHttp(app, access.callers, open_paths(clients), frontend, access.proxies, hosts)
        shared = allow_origins(guarded, clients.allowed_origins)
        http = serve_http(shared, clients.host, clients.port, connections, access.client_tls)
        http_address = await started.enter_async_context(http)
        await server.set_serving(True)
        try:
            await connect(config, frontend, services, read_addresses)
            yield server.address, http_address, frontend
        finally:
            await server.set_serving(False)
            await frontend.drain(times.shutdown)


async def connect(
    config: Config,
    frontend: Frontend,
    services: Mapping[str, ControlLine],
    read_addresses: Callable[[], Mapping[str, str]],
) -> None:
    """Wait until the services have found each other, and tell the frontend how long a session may be. Raises
    ClusterError."""
    log.info("waiting for the services to find each other", extra=read_addresses())
    seconds = config.clients.timeouts.connect
    targets = await wait_until_connected(frontend.router, services, read_addresses, seconds)
    pages = min(round(target.gauges.get("kv_pages", 0)) for target in targets)
    room = pages * PAGE_SIZE - config.target.most_drafted - 1
    frontend.limits = replace(frontend.limits, kv_tokens=max(room, 0))


def make_frontend(config: Config, router: Router, tracer: Any = None) -> Frontend:
    """Return the model's frontend. tracer: makes spans of requests, None for no traces.

    Raises the errors of transformers for a tokenizer that it cannot load.
    """
    clients, model = config.clients, config.target.model
    tokenizer = load_tokenizer(model)
    plan = load_served_plan(config.target.plan_file, 0.0, *config.target.pair)
    generation = load_generation_config(model)
    defaults = generation if clients.generation_config == "auto" else {}
    limits = Limits(
        model_name=config.model_name,
        vocab_size=min(load_shape(model).vocab_size, count_token_ids(tokenizer)),
        max_context=config.target.max_context,
        stop_token_ids=stop_token_ids(generation, tokenizer),
        defaults=default_sampling(defaults),
        uncalibrated=not plan.is_calibrated,
    )
    observer = Observer(Metrics(limits.model_name), tokenizer, clients.logging.requests, tracer)
    reply_format = find_format(tokenizer, clients.tool_call_parser, clients.reasoning_parser)
    return Frontend(router, tokenizer, limits, observer, config.draft_name, reply_format)


async def run(
    config: Config,
    access: Access,
    directories: Directories,
    placement: "RayPlacement | None" = None,
    look: Look | None = None,
) -> None:
    """Serve clients over the services in the directories until SIGINT or SIGTERM, which also end a start that waits.

    placement: supervises the services, None if another launch does. look: finds services that another launch has
    placed. Raises ClusterError if the services are lost for good, and the errors of `serve_clients`.
    """
    stop = asyncio.Event()
    stop_on_signals = partial(_call_on_signals, stop.set)
    starting = asyncio.current_task()
    assert starting is not None
    _call_on_signals(starting.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        lines = Lines(directories.values(), access.peers)
        informing = [keep_drafts_informed(lines, directories["target"])] if placement else []
        async with (
            meanwhile(*informing),
            serve_clients(config, access, directories, lines) as (grpc_address, http_address, frontend),
        ):
            stop_on_signals()
            print(f"gRPC endpoint: {grpc_address}")
            print(f"HTTP endpoint: {http_address}")
            services = await read_statuses(lines)
            placed = placement.choice.in_words if placement is not None else ""
            has_template, most = bool(frontend.tokenizer.chat_template), config.target.max_sessions
            for line in welcome(http_address, config.clients, frontend.limits, most, has_template, services, placed):
                print(line)
            keep_loaded()
            print("ready", flush=True)
            watching, turn = [], asyncio.Lock()
            if placement is not None:
                put = partial(_put, directories)
                watching.append(Supervisor(lines, placement, put, stop_on_signals, turn).run())
                asked, least = config.cluster.autoscaling, max(1, config.cluster.targets)
                if asked.max_targets > least:
                    targets = frontend.router.targets
                    watching.append(Autoscaler(asked, least, targets, lines, directories, placement, turn).run())
            if look is not None:
                watching.append(keep_found(look, directories))
            if config.clients.api_keys_file:
                watching.append(watch_keys(config.clients, access.callers.replace))
            await run_together(stop.wait(), *watching)
            running = frontend.router.running
            print(f"stopping: {running} running requests get time to finish" if running else "stopping", flush=True)


def _put(directories: Directories, name: str, address: str) -> None:
    """Store the address of a service, unless it was taken away meanwhile."""
    directory = directories[side_of(name)]
    if name in directory.addresses:
        directory.put(name, address)


def _call_on_signals(stop: Callable[[], object]) -> None:
    """Call `stop` at SIGINT and SIGTERM from now on, and nothing else."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
