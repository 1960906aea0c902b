"""OpenAI-style HTTP: the application and its paths."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from orchestrator.api.answers import Answer, Event
from orchestrator.api.chat_answer import ChatAnswer
from orchestrator.api.completion_answer import CompletionAnswer
from orchestrator.api.dashboard.routes import router as dashboard
from orchestrator.api.event_stream import open_stream, unless_left
from orchestrator.api.http_requests import JSONRoute, error_answer
from orchestrator.api.messages_answer import PATH as MESSAGES
from orchestrator.api.messages_answer import MessagesAnswer
from orchestrator.api.responses_answer import ResponsesAnswer
from orchestrator.cluster.service_status import StatusReader
from orchestrator.requests.callers import current_caller
from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.messages_request import MessagesRequest, PromptRequest
from orchestrator.requests.messages_request import to_chat as messages_to_chat
from orchestrator.requests.records import max_body
from orchestrator.requests.requests import (
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    invalid_argument,
    read_request,
)
from orchestrator.requests.responses_request import ResponsesRequest, after, input_items, to_chat
from orchestrator.sessions.generation import Chunk, Frontend
from orchestrator.sessions.response_store import ResponseStore
from orchestrator.text.chat import render_chat
from orchestrator.text.tokenizing import work_on_text
from specahead.config.version import running_version
from specahead.wire.errors import InvalidArgument, ServiceError

# What the APIs of OpenAI and vLLM have, with /v1 before it or without, and this one has not.
_NOT_SERVED = {
    **{"embeddings": "embeddings", "images": "images", "audio": "audio", "videos": "videos", "realtime": "audio"},
    **{"moderations": "moderation", "files": "files", "uploads": "files", "batches": "batches"},
    **{"pooling": "embeddings", "rerank": "ranking", "score": "ranking", "classify": "ranking"},
    **{"fine_tuning": "training", "vector_stores": "files", "assistants": "assistants", "threads": "assistants"},
}

# Without this, the OpenAPI schema would promise FastAPI's own form of errors.
router = APIRouter(route_class=JSONRoute, responses={"4XX": {"description": "An error in OpenAI's form"}})


def make_app(
    frontend: Frontend,
    read_status: StatusReader,
    read_addresses: Callable[[], Mapping[str, str]],
    responses: ResponseStore | None = None,
) -> FastAPI:
    """Return the application that serves HTTP clients. read_addresses: returns the services' addresses, by name.

    responses: stored ones, None if none are stored.
    """
    most = max_body(frontend.limits)
    # Swagger's files come from a package, and none of them asks anybody whether the schema is right.
    shown = {"redoc_url": None, "swagger_ui_parameters": {"validatorUrl": None}}
    app: FastAPI = FastAPIOffline(title="specahead", version=running_version(), max_body_size=most, **shown)
    app.state.frontend, app.state.read_status, app.state.read_addresses = frontend, read_status, read_addresses
    app.state.responses = responses
    app.include_router(router)
    app.include_router(dashboard)
    for kind in (ServiceError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request whose handler has raised an error."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        code, headers = error.status_code, dict(error.headers or {})
        detail = _missing(request.url.path) if code == HTTPStatus.NOT_FOUND else error.detail
        error = InvalidArgument(detail, code=HTTPStatus(code).name.lower())
    else:
        if isinstance(error, RequestValidationError):  # places begin with "body"
            error = invalid_argument([{**e, "loc": e["loc"][1:]} for e in error.errors()])
        elif not isinstance(error, ServiceError):  # uvicorn logs it
            error = ServiceError("the server failed to answer this request")
        code = error.http_code
    request.app.state.frontend.observer.report(error, request=getattr(request.state, "request_id", None))
    return error_answer(request.url.path, error, code, headers)


def _missing(path: str) -> str:
    """Return why nothing is at a path."""
    what = path.removeprefix("/v1").lstrip("/").partition("/")[0]
    if what in _NOT_SERVED:
        return f"{path} is not served: this server generates text and has no {_NOT_SERVED[what]}"
    return f"there is nothing at {path[:80]}; /docs lists what is served"


async def _frontend(request: Request) -> Frontend:  # async, since FastAPI calls others in a thread
    return request.app.state.frontend


Served = Annotated[Frontend, Depends(_frontend)]


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, frontend: Served) -> Response:
    """Continue one prompt or several."""
    frontend.check_model(body.model)
    name = _name(body, request)
    special = body.add_special_tokens is not False
    tokens: list[list[int]] = []
    for prompt in body.prompts:
        if tokens:
            await asyncio.sleep(0)  # lets other requests run between prompts
        tokens.append(await frontend.encode(prompt, special))
    answer = CompletionAnswer(name, frontend.name, body, tokens, frontend.tokenizer.decode)
    return await _answer(request, frontend, body, tokens, answer)


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, frontend: Served) -> Response:
    """Give the next message of a conversation."""
    frontend.check_model(body.model)
    name = _name(body, request)
    prompt, tokens = await _chat_prompt(body, frontend, request)
    parsers = [frontend.reply_parser(body, prompt) for _ in range(body.n or 1)]
    answer = ChatAnswer(name, frontend.name, body, tokens, parsers, frontend.tokenizer)
    return await _answer(request, frontend, body, [tokens], answer, prompt)


@router.post("/v1/responses")
async def respond(body: ResponsesRequest, request: Request, frontend: Served) -> Response:
    """Give the response to a conversation, which the request has as a whole unless it continues a stored one."""
    frontend.check_model(body.model)
    continued, store = _stored(body, request.app.state.responses)
    body_as_chat = to_chat(continued)
    name = _name(body_as_chat, request)
    prompt, tokens = await _chat_prompt(body_as_chat, frontend, request)
    parser = frontend.reply_parser(body_as_chat, prompt)
    answer = ResponsesAnswer(name, frontend.name, body, parser, frontend.tokenizer, store)
    return await _answer(request, frontend, body_as_chat, [tokens], answer, prompt)


def _stored(
    body: ResponsesRequest, responses: ResponseStore | None
) -> tuple[ResponsesRequest, Callable[[str, list[Event]], None] | None]:
    """Return a request with the stored conversation that it continues, and a function that stores its response.

    The function takes the response's id and items; None if it is not to be stored. Raises ServiceError.
    """
    caller, previous = current_caller().name, body.previous_response_id
    if responses is None:
        if previous is not None:
            raise InvalidArgument(
                "previous_response_id: no responses are stored here: send the conversation along, or start the server "
                'with --http \'{"response_store": "FILE"}\'',
                "previous_response_id",
                "unsupported_parameter",
            )
        return body, None
    own = input_items(body)
    continued = body if previous is None else after(body, responses.read(previous, caller))
    if body.store is False:
        return continued, None
    return continued, lambda name, items: responses.write(name, caller, previous, own + items)


@router.post(MESSAGES)
async def write_message(body: MessagesRequest, request: Request, frontend: Served) -> Response:
    """Give the next message of a conversation, as Anthropic does. max_tokens may be more than there is room for."""
    frontend.check_model(body.model)
    as_chat = messages_to_chat(body)
    name = _name(as_chat, request)
    prompt, tokens = await _chat_prompt(as_chat, frontend, request)
    as_chat.max_tokens = max(1, min(body.max_tokens, frontend.limits.longest - len(tokens)))
    parser = frontend.reply_parser(as_chat, prompt)
    parallel = as_chat.parallel_tool_calls is not False
    answer = MessagesAnswer(name, frontend.name, body, len(tokens), parser, parallel)
    return await _answer(request, frontend, as_chat, [tokens], answer, prompt)


@router.post(f"{MESSAGES}/count_tokens")
async def count_tokens(body: PromptRequest, request: Request, frontend: Served) -> dict[str, Any]:
    """Give the number of tokens of a conversation's prompt."""
    frontend.check_model(body.model)
    _, tokens = await _chat_prompt(messages_to_chat(body), frontend, request)
    return {"input_tokens": len(tokens)}


async def _chat_prompt(body: ChatRequest, frontend: Frontend, request: Request) -> tuple[str, list[int]]:
    """Return the text and the tokens of a conversation's prompt. Raises InvalidArgument."""
    render = partial(render_chat, body, frontend.tokenizer, frontend.reply_format, frontend.encoder)
    prompt = await work_on_text(render, len(await request.body()))  # has messages, tools and everything else
    return prompt, await frontend.encode(prompt, special_tokens=False, rendered=True)


def _name(body: GenerationRequest, request: Request) -> str:
    """Return the name of a request and its sessions: the one that it asks for, else one that begins with its id."""
    body.request_id = body.request_id or f"{request.state.request_id}.{secrets.token_hex(4)}"
    return body.request_id


async def _answer(
    request: Request,
    frontend: Frontend,
    body: GenerationRequest,
    prompts: list[list[int]],
    answer: Answer,
    prompt: str = "",
) -> Response:
    """Return the HTTP response of an answer, whole or as a stream. Raises ServiceError.

    prompts: their tokens. prompt: the text of a chat.
    """
    grammar = await frontend.grammar(body, prompt)
    chunks = frontend.generate(frontend.prepare(body, prompts, grammar), body)
    if body.stream:
        return await open_stream(answer, chunks)
    async with aclosing(chunks):
        whole = await unless_left(request, _whole(answer, chunks))
    if whole is None:
        return JSONResponse(None, 499)
    shows = body.return_speculation or "x-return-speculation" in request.headers
    return JSONResponse(whole | answer.speculation() if shows else whole)


async def _whole(answer: Answer, chunks: AsyncGenerator[Chunk]) -> Event:
    """Return the answer that a stream of these chunks adds up to."""
    answer.opening()
    async for chunk in chunks:
        answer.add(chunk)
    return answer.whole()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, frontend: Served) -> Response:
    """Give the token ids of a prompt or of a conversation, as vLLM does."""
    frontend.check_model(body.model)
    if body.messages is None:
        tokens = await frontend.encode(body.prompt or "", body.add_special_tokens is not False)
    else:
        fields = body.model_dump(exclude_unset=True, exclude={"prompt", "add_special_tokens", "return_token_strs"})
        text, _ = await _chat_prompt(read_request(ChatRequest, fields), frontend, request)
        tokens = await frontend.encode(text, body.add_special_tokens is True, rendered=True)
    answer = {"count": len(tokens), "max_model_len": frontend.limits.max_context, "tokens": tokens}
    strings = frontend.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return JSONResponse(answer | {"token_strs": strings})  # not a dict: FastAPI would check each token


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, frontend: Served) -> dict[str, Any]:
    """Give the text of token ids."""
    frontend.check_model(body.model)
    tokens = await frontend.encode(body.tokens)
    return {"prompt": await work_on_text(partial(frontend.tokenizer.decode, tokens), len(tokens))}


@router.get("/v1/models")
async def list_models(frontend: Served) -> dict[str, Any]:
    """List the model that is served."""
    return {"object": "list", "data": [_model_card(frontend)]}


@router.get("/v1/models/{model:path}")
async def show_model(model: str, frontend: Served) -> dict[str, Any]:
    """Describe the model of that name."""
    frontend.check_model(model)
    return _model_card(frontend)


def _model_card(frontend: Frontend) -> dict[str, Any]:
    return {
        "id": frontend.name,
        "object": "model",
        "root": frontend.name,
        "created": frontend.created,
        "owned_by": "specahead",
        "max_model_len": frontend.limits.max_context,
        "draft": frontend.draft_name,
        "calibrated": not frontend.limits.uncalibrated,
    }


@router.get("/live")
async def live() -> dict[str, Any]:
    """Answer as long as the process runs."""
    return {"status": "ok"}


@router.get("/ready")
@router.get("/health")
async def health(frontend: Served) -> JSONResponse:
    """Answer 200 while requests can be served. A lost draft only makes them slower."""
    if frontend.ready:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable"}, 503, {"Retry-After": "1"})


@router.get("/version")
async def show_version() -> dict[str, Any]:
    """Give the version of specahead."""
    return {"version": running_version()}


@router.get("/metrics")
async def metrics(request: Request, frontend: Served) -> Response:
    """Give the metrics for Prometheus."""
    state = request.app.state
    statuses, addresses = await state.read_status(), state.read_addresses()
    router = frontend.router
    text = frontend.observer.metrics.exposition(router.running, statuses, addresses, router.target_states())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
