"""The client endpoints over a running target and draft: what is served, until when."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

from config import Config, SettingsError
from engine.kv.pages import PAGE_SIZE
from engine.loading.shape import load_shape
from engine.loading.tokenizer import count_token_ids, load_generation_config, load_tokenizer, stop_token_ids
from orchestrator.access import Access, open_paths, require_key
from orchestrator.generation import Frontend
from orchestrator.grpc_gateway import InferenceServicer
from orchestrator.http_gateway import make_app, serve_http
from orchestrator.metrics import Metrics
from orchestrator.records import Limits
from orchestrator.replies import find_format
from orchestrator.router import Router
from orchestrator.services import dialled
from protos import inference_pb2_grpc
from sparsity.methods import methods_of
from sparsity.plan import load_plan
from wire.server import start_server

log = logging.getLogger(__name__)


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
async def serve_clients(config: Config, access: Access, target: str, draft: str) -> AsyncIterator[tuple[str, str]]:
    """The client endpoints over services at the given addresses (gRPC, HTTP); drained and closed at the end.

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
        **{name: float(defaults[name]) for name in ("temperature", "top_p") if defaults.get(name)},
    )
    router = Router(target, access.peers, clients.resume_timeout)
    metrics = Metrics(limits.model_name)
    reply_format = find_format(tokenizer, clients.tool_call_parser, clients.reasoning_parser)
    frontend = Frontend(router, tokenizer, limits, metrics, config.draft.model, reply_format, clients.log_requests)
    async with contextlib.AsyncExitStack() as started:
        services = await started.enter_async_context(dialled(access.peers, target, draft))
        await started.enter_async_context(router.connected_to_target())
        servicer = InferenceServicer(frontend)
        add = inference_pb2_grpc.add_InferenceServicer_to_server
        inference = (add, servicer, "specahead.v1.Inference")
        server = await start_server(
            clients.host, clients.grpc_port, [inference], access.client_guard(frontend.observer.report)
        )
        started.push_async_callback(server.stop, 1.0)
        app = require_key(
            make_app(frontend, services.read_status), access.callers, open_paths(clients), frontend.observer.report
        )
        http = serve_http(app, clients.host, clients.http_port, clients.tls_cert, clients.tls_key)
        http_address = await started.enter_async_context(http)
        await server.set_serving(True)
        try:
            log.info("waiting for the services to find each other", extra={"target": target, "draft": draft})
            status = await services.wait_until_connected(router)
            room = round(status.gauges.get("kv_pages", 0)) * PAGE_SIZE - config.target.gamma - 1
            frontend.limits = replace(limits, kv_tokens=max(room, 0))
            yield server.address, http_address
        finally:
            await server.set_serving(False)
            await frontend.drain(clients.shutdown_grace)


async def run(config: Config, access: Access, target: str, draft: str) -> None:
    """Serve clients over the services at these addresses until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serve_clients(config, access, target, draft) as (grpc_address, http_address):
        print(f"gRPC endpoint: {grpc_address}")
        print(f"HTTP endpoint: {http_address}")
        print("ready", flush=True)
        await stop.wait()
        print("stopping: requests in flight are given time to finish", flush=True)
