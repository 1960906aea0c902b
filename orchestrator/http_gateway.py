"""OpenAI-style HTTP: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""

import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web

from orchestrator.generation import Chunk, Frontend
from orchestrator.ledger import Record
from orchestrator.requests import GenerationRequest, check_text
from wire.errors import InvalidArgument, ServiceError
from wire.messages import FinishReason, ServiceStatus

StatusReader = Callable[[], Awaitable[Mapping[str, ServiceStatus | None]]]

MAX_BODY = 64 << 20

# Our additions to OpenAI's fields, as vLLM adds its own: exactness, sparsity, ignore_eos, request_id.
_COMMON = {
    "model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options",
    "exactness", "sparsity", "ignore_eos", "request_id", "user",
}  # fmt: skip
_COMPLETION_FIELDS = _COMMON | {"prompt"}
_CHAT_FIELDS = _COMMON | {"messages", "max_completion_tokens"}
# Accepted at the value that asks for nothing; any other value is refused by name.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "suffix": ("",), "tools": ([],), "tool_choice": ("none",),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True,), "store": (False,),
    "metadata": ({},), "top_logprobs": (0,), "min_p": (0,), "top_k": (-1, 0), "repetition_penalty": (1,),
}  # fmt: skip


def make_app(frontend: Frontend, read_status: StatusReader) -> web.Application:
    gateway = _Gateway(frontend, read_status)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors_as_json])
    app.add_routes(
        [
            web.post("/v1/completions", gateway.completions),
            web.post("/v1/chat/completions", gateway.chat),
            web.get("/v1/models", gateway.models),
            web.get("/v1/models/{model}", gateway.model),
            web.get("/health", gateway.health),
            web.get("/metrics", gateway.metrics),
        ]
    )
    return app


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ServiceError as error:
        return web.json_response(_error_body(error), status=error.http_code)
    except RecursionError:
        return web.json_response(_error_body(InvalidArgument("the body is nested too deeply")), status=400)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        body = _error_body(InvalidArgument(error.reason), error.status)
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response(body, status=error.status, headers=headers)


def _error_body(error: ServiceError, code: int = 0) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": code or error.http_code}}


class _Gateway:
    def __init__(self, frontend: Frontend, read_status: StatusReader) -> None:
        self._frontend = frontend
        self._read_status = read_status

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await _read_body(request, _COMPLETION_FIELDS)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            raise InvalidArgument("prompt: several prompts in one request are not supported yet; send one each")
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_int, prompt))):
            raise InvalidArgument("prompt: expected a string or a list of token ids")
        return await self._answer(request, body, prompt, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _read_body(request, _CHAT_FIELDS)
        text = self._render_chat(body.get("messages"))
        prompt = await self._frontend.tokenize(text, special_tokens=False)
        if (limit := body.get("max_completion_tokens")) is not None:
            if not _is_int(limit):
                raise InvalidArgument(f"max_completion_tokens: expected an integer, got {str(limit)[:80]!r}")
            body["max_tokens"] = limit
        return await self._answer(request, body, prompt, chat=True)

    def _render_chat(self, messages: Any) -> str:
        if not isinstance(messages, list) or not messages:
            raise InvalidArgument("messages: expected a list of at least one message")
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        tokenizer = self._frontend.tokenizer
        if not tokenizer.chat_template:
            raise InvalidArgument(
                f"model {self._frontend.limits.model_name!r} has no chat template; use /v1/completions"
            )
        try:
            return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes for messages that it does not take
            raise InvalidArgument(f"messages: the model's chat template refuses them: {error}") from error

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str | list[int], chat: bool
    ) -> web.StreamResponse:
        generation = _generation_request(body, prompt)
        record = await self._frontend.prepare(generation)
        answer = _Answer(chat, record, self._frontend.limits.model_name)
        async with aclosing(self._frontend.generate(record, generation.stop)) as chunks:
            if not _bool(body, "stream"):
                pieces = [chunk async for chunk in chunks]
                text = "".join(chunk.text for chunk in pieces)
                return web.json_response(answer.whole(text, pieces[-1]))
            return await self._stream(request, answer, chunks, _include_usage(body))

    async def _stream(self, request: web.Request, answer: "_Answer", chunks: Any, usage: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(data: dict[str, Any] | str) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"data: {text}\n\n".encode())

        # The status line waits for the first round, so that a refusal still has its HTTP code.
        first = await anext(chunks)
        await response.prepare(request)
        try:
            if (opening := answer.opening()) is not None:
                await send(opening)
            await self._send_chunk(send, answer, first, usage)
            async for chunk in chunks:
                await self._send_chunk(send, answer, chunk, usage)
        except ServiceError as error:
            await send(_error_body(error))
        await send("[DONE]")
        await response.write_eof()
        return response

    async def _send_chunk(
        self, send: Callable[[Any], Awaitable[None]], answer: "_Answer", chunk: Chunk, usage: bool
    ) -> None:
        last = chunk.finish_reason is not FinishReason.NONE
        if chunk.text or last:
            await send(answer.piece(chunk))
        if last and usage:
            await send(answer.usage_piece(chunk))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        card = self._model_card()
        if request.match_info["model"] != card["id"]:
            raise web.HTTPNotFound(reason=f"model {request.match_info['model']!r} is not served here")
        return web.json_response(card)

    def _model_card(self) -> dict[str, Any]:
        limits = self._frontend.limits
        return {
            "id": limits.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "specahead",
            "max_model_len": limits.max_context,
            "draft": self._frontend.draft_name,
        }

    async def health(self, request: web.Request) -> web.Response:
        """200 while requests can be served: a lost draft only makes them slower."""
        connected = self._frontend.router.connected and self._frontend.accepting
        return web.json_response({"status": "ok" if connected else "unavailable"}, status=200 if connected else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        text = self._frontend.metrics.render(await self._read_status())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _read_body(request: web.Request, fields: set[str]) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except web.RequestPayloadError:
        raise InvalidArgument("the body is not encoded as its headers say") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    for name, value in body.items():
        if name in fields or value is None:
            continue
        if not any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            raise InvalidArgument(f"{name}: this field is not supported (value {str(value)[:80]!r})")
    return body


def _plain_message(index: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or set(message) - {"role", "content", "name"}:
        raise InvalidArgument(f"messages[{index}]: expected role and content only; other fields are not supported")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise InvalidArgument(f"messages[{index}].content: only text parts are supported")
        content = "".join(str(part) for part in parts)
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidArgument(f"messages[{index}]: role and content must be strings")
    return {"role": check_text(role, "role"), "content": check_text(content, "content")}


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not a number where a truth value is meant: `logprobs: 0` asks for something, false does not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bool(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"{name}: expected true or false, got {value!r}")
    return bool(value)


def _include_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise InvalidArgument("stream_options: only include_usage is supported")
    return _bool(options, "include_usage")


def _generation_request(body: dict[str, Any], prompt: str | list[int]) -> GenerationRequest:
    def typed(name: str, check: Callable[[Any], bool], expected: str) -> Any:
        value = body.get(name)
        if value is not None and not check(value):
            raise InvalidArgument(f"{name}: expected {expected}, got {str(value)[:80]!r}")
        return value

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    if body.get("stream_options") is not None and not body.get("stream"):
        raise InvalidArgument("stream_options: only with stream")
    _include_usage(body)
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise InvalidArgument("stop: expected a string or a list of strings")
    return GenerationRequest(
        prompt=prompt,
        request_id=typed("request_id", lambda v: isinstance(v, str), "a string") or "",
        model=typed("model", lambda v: isinstance(v, str), "a string"),
        max_tokens=typed("max_tokens", _is_int, "an integer"),
        temperature=typed("temperature", is_number, "a number"),
        top_p=typed("top_p", is_number, "a number"),
        seed=typed("seed", _is_int, "an integer"),
        stop=stops,
        exactness=typed("exactness", lambda v: isinstance(v, str), "a string"),
        sparsity=typed("sparsity", lambda v: isinstance(v, str), "a string"),
        ignore_eos=_bool(body, "ignore_eos"),
    )


class _Answer:
    """The JSON bodies of one answer, to a chat or to a completion."""

    def __init__(self, chat: bool, record: Record, model: str) -> None:
        self._chat = chat
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._kind = "chat.completion" if chat else "text_completion"
        self._piece_kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = {"id": prefix + record.session, "created": int(time.time()), "model": model}

    def whole(self, text: str, last: Chunk) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = _choice(content, last.finish_reason)
        return self._head | {"object": self._kind, "choices": [choice]} | _usage(last)

    def opening(self) -> dict[str, Any] | None:
        """What a chat's stream begins with."""
        content = {"delta": {"role": "assistant", "content": ""}}
        return self._piece([_choice(content, FinishReason.NONE)]) if self._chat else None

    def piece(self, chunk: Chunk) -> dict[str, Any]:
        text = chunk.text
        content = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        return self._piece([_choice(content, chunk.finish_reason)])

    def usage_piece(self, last: Chunk) -> dict[str, Any]:
        return self._piece([]) | _usage(last)

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self._piece_kind, "choices": choices}


def _choice(content: Mapping[str, Any], reason: FinishReason) -> dict[str, Any]:
    name = None if reason is FinishReason.NONE else reason.name.lower()
    return {"index": 0, **content, "logprobs": None, "finish_reason": name}


def _usage(last: Chunk) -> dict[str, Any]:
    return {
        "usage": {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "total_tokens": last.prompt_tokens + last.completion_tokens,
        },
        "speculation": last.totals.summary(),
    }


async def start_http(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Listen; raises OSError naming the address. handler_cancellation: a client that leaves ends its request."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    bound = runner.addresses[0][1]
    return runner, f"http://{host}:{bound}"
