"""OpenAI-style HTTP: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.answers import Answer, error_body, error_headers
from orchestrator.generation import Chunk, Frontend
from orchestrator.requests import ChatRequest, CompletionRequest, GenerationRequest, invalid_argument
from wire.errors import InvalidArgument, NotFound, ServiceError
from wire.messages import ServiceStatus

StatusReader = Callable[[], Awaitable[Mapping[str, ServiceStatus | None]]]

MAX_BODY = 64 << 20
_CLIENT_LEFT = 499  # what nginx calls it; nobody reads this answer


class _JSONRequest(Request):
    """A request whose body is JSON without lone surrogates and not nested too deeply, else it is refused with 400."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None


class _JSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            request = _JSONRequest(request.scope, request.receive)
            if request.method == "POST":
                kind, encoding = request.headers.get("content-type", ""), request.headers.get("content-encoding")
                if kind.partition(";")[0].strip().lower() != "application/json":
                    raise HTTPException(415, f"the body must be application/json, and its headers say {kind!r}")
                if encoding not in (None, "identity"):
                    raise HTTPException(415, f"the body must not be compressed; its headers say {encoding[:80]!r}")
                if not await request.body():
                    raise HTTPException(400, "the body is not valid JSON: it is empty")
            return await handle(request)

        return handle_json


router = APIRouter(route_class=_JSONRoute)


def make_app(frontend: Frontend, read_status: StatusReader) -> FastAPI:
    """Return the application that serves HTTP clients."""
    app = FastAPI(title="specahead", docs_url=None, redoc_url=None, openapi_url=None, max_body_size=MAX_BODY)
    app.state.frontend, app.state.read_status = frontend, read_status
    app.include_router(router)
    app.add_exception_handler(ServiceError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    """Return OpenAI's account of an error that a handler has raised."""
    headers = None
    if isinstance(error, RequestValidationError):  # places begin with "body"
        error = invalid_argument([{**e, "loc": e["loc"][1:]} for e in error.errors()])
    if isinstance(error, HTTPException):
        code, headers = error.status_code, error.headers
        error = InvalidArgument(error.detail)
    else:
        assert isinstance(error, ServiceError)
        code, headers = error.http_code, error_headers(error)
    if code != _CLIENT_LEFT:
        request.app.state.frontend.report(error)
    return JSONResponse(error_body(error), code, headers)


def _frontend(request: Request) -> Frontend:
    return request.app.state.frontend


Served = Annotated[Frontend, Depends(_frontend)]


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, frontend: Served) -> Response:
    """Continue a prompt."""
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidArgument("prompt: several prompts in one request are not supported yet", "prompt")
        prompt = prompt[0]
    return await _answer(request, body, frontend, await frontend.encode(prompt), chat=False)


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, frontend: Served) -> Response:
    """Give the next message of a conversation."""
    tokens = await frontend.encode(_render_chat(body, frontend), special_tokens=False)
    body.max_tokens = body.max_completion_tokens or body.max_tokens
    return await _answer(request, body, frontend, tokens, chat=True)


def _render_chat(body: ChatRequest, frontend: Frontend) -> str:
    plain = [{"role": message.role, "content": message.text} for message in body.messages]
    tokenizer = frontend.tokenizer
    if not tokenizer.chat_template:
        raise InvalidArgument(f"model {frontend.limits.model_name!r} has no chat template; use /v1/completions")
    try:
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes for messages that it does not take
        raise InvalidArgument(f"messages: the model's chat template refuses them: {error}", "messages") from error


async def _answer(
    request: Request, body: GenerationRequest, frontend: Frontend, tokens: list[int], chat: bool
) -> Response:
    record = frontend.prepare(body, tokens)
    answer = Answer(chat, record, frontend.limits.model_name)
    chunks = frontend.generate(record, body.stops)
    if body.stream:
        # The status line waits for the first round, so that a refusal still has its HTTP code.
        first = await _unless_left(request, anext(chunks))
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return _EventStream(_events(answer, first, chunks, usage))
    async with aclosing(chunks):
        pieces = await _unless_left(request, _gather(chunks))
    return JSONResponse(answer.whole("".join(chunk.text for chunk in pieces), pieces[-1]))


async def _gather(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def _unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """Return the outcome of some work, which is cancelled if the client leaves meanwhile."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())  # the body is read: what comes next is the client's leaving
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(_CLIENT_LEFT, "the client has left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class _EventStream(StreamingResponse):
    """Server-sent events; their generator is closed at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _events(answer: Answer, first: Chunk, chunks: AsyncGenerator[Chunk], usage: bool) -> AsyncGenerator[str]:
    async with aclosing(chunks):
        try:
            for piece in [*answer.opening(), *answer.pieces(first, usage)]:
                yield _event(piece)
            async for chunk in chunks:
                for piece in answer.pieces(chunk, usage):
                    yield _event(piece)
        except ServiceError as error:
            yield _event(error_body(error))
    yield "data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@router.get("/v1/models")
async def list_models(frontend: Served) -> dict[str, Any]:
    """List the one model that is served."""
    return {"object": "list", "data": [_model_card(frontend)]}


@router.get("/v1/models/{model:path}")
async def show_model(model: str, frontend: Served) -> dict[str, Any]:
    """Describe the model of that name."""
    if model != frontend.limits.model_name:
        raise NotFound(f"model {model!r} is not served here", "model", "model_not_found")
    return _model_card(frontend)


def _model_card(frontend: Frontend) -> dict[str, Any]:
    return {
        "id": frontend.limits.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "specahead",
        "max_model_len": frontend.limits.max_context,
        "draft": frontend.draft_name,
    }


@router.get("/health")
async def health(frontend: Served) -> JSONResponse:
    """Answer 200 while requests can be served: a lost draft only makes them slower."""
    connected = frontend.router.connected and frontend.accepting
    return JSONResponse({"status": "ok" if connected else "unavailable"}, 200 if connected else 503)


@router.get("/metrics")
async def metrics(request: Request, frontend: Served) -> Response:
    """Give Prometheus its figures."""
    text = frontend.metrics.render(frontend.router.running, await request.app.state.read_status())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class _EmbeddedServer(uvicorn.Server):
    """A server inside a running event loop; signals are the launch's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def serve_http(app: ASGIApp, host: str, port: int, cert: str = "", key: str = "") -> AsyncIterator[str]:
    """Listen on host:port (0: any free one) while the context lasts, and yield the address.

    cert, key: PEM files; without them the port speaks plain text. Raises OSError naming an address that cannot be
    bound.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        ssl_certfile=cert or None,
        ssl_keyfile=key or None,
    )
    server = _EmbeddedServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"{'https' if cert else 'http'}://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
