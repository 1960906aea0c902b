"""The targets of fuzzing: all code that reads bytes of strangers. Each takes bytes and returns how they were taken.

A target raises nothing. It returns the errors by which callers expect refusals.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from http import HTTPStatus
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from pydantic_core import from_json

from orchestrator.api.grpc_gateway import _request_from_pb
from orchestrator.api.http_gateway import make_app
from orchestrator.api.http_requests import GuardedHttp
from orchestrator.requests.access import Proxies
from orchestrator.requests.callers import Callers
from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.records import check_tokens, to_records
from orchestrator.requests.requests import CompletionRequest, DetokenizeRequest, TokenizeRequest, read_request
from orchestrator.requests.responses_request import ResponsesRequest, to_chat
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.observer import Observer
from orchestrator.text.chat import render_chat
from orchestrator.text.replies import ReplyFormat
from orchestrator.text.special_tokens import TextEncoder
from protos import control_pb2, inference_pb2, speculation_pb2
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.sampling.distributions import Sampling, Support
from specahead.models import TARGET
from specahead.sparsity.selection import BlockSelection
from specahead.wire import convert
from specahead.wire import messages as m
from specahead.wire.errors import InvalidArgument, ServiceError
from specahead.wire.selection_codec import decode_selection, encode_selection
from tests.fuzz import hostile_draft
from tests.fuzz.mutators import mutate_bytes, mutate_json, mutate_message
from tests.plans import selection_of
from tests.proposals import together
from tests.unit.gateway import LIMITS, MODEL, ScriptedRouter

AT = m.At("a", 1, 2, 30)
OPEN = m.Open("a", [1, 2, 3], 3, 10, [0], Sampling(0.5, 0.9, 7), m.Exactness.APPROXIMATE, "ahead")
SUPPORT = Support(np.array([5, 9]), np.array([0.75, 0.25], dtype=np.float32))
HEADS, BLOCKS = 6, 100
TAKEN = "taken"


@dataclass(frozen=True)
class Target:
    """A target. share: its part of the inputs that a run gives each target; less than 1 if inputs take long."""

    name: str
    seeds: list[bytes]
    take: Callable[[bytes], str]
    mutate: Callable[..., bytes] = mutate_bytes
    share: float = 1.0


def _message(
    name: str,
    kind: type[Message],
    read: Callable[[Any], Any],
    seeds: Iterable[Message],
    refusal: type[ServiceError] = InvalidArgument,
) -> Target:
    def take(data: bytes) -> str:
        try:
            read(kind.FromString(data))
        except DecodeError:
            return "no message"
        except refusal as error:
            return str(error)
        return TAKEN

    def mutate(data: bytes, rng: Any) -> bytes:
        return mutate_message(data, kind, rng) if rng.random() < 0.7 else mutate_bytes(data, rng)

    return Target(name, [seed.SerializeToString() for seed in seeds], take, mutate)


def _read_draft_frame(frame: speculation_pb2.DraftFrame) -> None:
    convert.hello_from_pb(frame.hello)
    for pb in frame.batch.events:
        convert.session_in(pb, "event")
        convert.draft_event_from_pb(pb)


def _read_target_frame(frame: speculation_pb2.TargetFrame) -> None:
    convert.hello_from_pb(frame.welcome.target)
    for pb in frame.batch.events:
        convert.target_event_from_pb(pb)


def _read_serve_frame(frame: control_pb2.ServeFrame) -> None:
    convert.session_in(frame, "body")
    convert.serve_request_from_pb(frame)


def _read_served_frame(frame: control_pb2.ServedFrame) -> None:
    for pb in frame.events:
        convert.served_event_from_pb(pb)


def messages() -> list[Target]:
    """Return a target for each message that a service, an orchestrator or a client receives."""
    hello = m.Hello("draft", "any", 4096, "hash", "plan", 4, 16)
    items = [m.Proposal(AT, token, [5, 5], [SUPPORT, SUPPORT], 0.1) for token in (7, 8)]
    drafted = [together(*items, selection=b"123"), m.Ready(AT), m.Decline("a", "full"), m.Resync("a"), m.Load(3)]
    drafted.append(m.Beat())
    told = [m.Begin(AT, [1, 2], OPEN.sampling, 9, True), m.Verdict(AT, 1, [5, 6], False), m.End("a")]
    served = [m.Commit(AT, [5], 4, 1, m.FinishReason.STOP), m.Closed("a", 8, "full"), m.Beat()]
    status = m.ServiceStatus("target", 1, ["draft"], "", {"rounds": 1.0}, {"sessions": 2.0})
    asked = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1, 2]), max_tokens=5, temperature=0.5, stop=["a"], n=2, seed=1
    )
    greeting = speculation_pb2.DraftFrame(hello=convert.hello_to_pb(hello))
    welcome = speculation_pb2.Welcome(target=convert.hello_to_pb(hello))
    return [
        _message(
            "draft-frame",
            speculation_pb2.DraftFrame,
            _read_draft_frame,
            [greeting, convert.draft_events_to_pb(drafted), *(convert.draft_events_to_pb([each]) for each in drafted)],
        ),
        _message(
            "target-frame",
            speculation_pb2.TargetFrame,
            _read_target_frame,
            [
                speculation_pb2.TargetFrame(welcome=welcome),
                convert.target_events_to_pb([*told, m.Refusal(AT, "gap"), m.Beat()]),
            ],
        ),
        _message(
            "serve-frame",
            control_pb2.ServeFrame,
            _read_serve_frame,
            [convert.serve_request_to_pb(each) for each in (OPEN, m.Abort("a"), m.Beat())],
        ),
        _message("served-frame", control_pb2.ServedFrame, _read_served_frame, [convert.served_events_to_pb(served)]),
        _message("status", control_pb2.ServiceStatus, convert.status_from_pb, [convert.status_to_pb(status)]),
        _message(
            "generate",
            inference_pb2.GenerateRequest,
            lambda pb: to_records(_request_from_pb(pb), [[1, 2]], LIMITS),
            [asked, inference_pb2.GenerateRequest(text="The sea", exactness=control_pb2.EXACTNESS_APPROXIMATE)],
            ServiceError,
        ),
    ]


def announcement() -> Target:
    """Return a target that reads announcements, with two earlier selections of different lengths as references."""
    rng = np.random.default_rng(0)

    def selection(blocks: int) -> BlockSelection:
        return selection_of([np.flatnonzero(rng.random(blocks) < 0.2).tolist() for _ in range(HEADS)], blocks)

    held = {(1, 1): selection(BLOCKS - 3), (1, 2): selection(BLOCKS)}
    made = selection(BLOCKS)

    def take(data: bytes) -> str:
        try:
            decode_selection(data, held, HEADS, BLOCKS)
        except InvalidArgument as error:
            return str(error)
        return TAKEN

    return Target("announcement", [encode_selection(made), encode_selection(made, ((1, 2), held[1, 2]))], take)


# HTTP


@cache
def _tokenizer() -> Any:
    return load_tokenizer(str(TARGET))


def _complete(body: Any) -> None:
    request = read_request(CompletionRequest, body)
    prompts = [[1, 2] if isinstance(prompt, str) else check_tokens(prompt, LIMITS) for prompt in request.prompts]
    to_records(request, prompts, LIMITS)


def _chat(body: Any) -> None:
    request = read_request(ChatRequest, body)
    render_chat(request, _tokenizer(), ReplyFormat(), TextEncoder(_tokenizer()))
    to_records(request, [[1, 2]], LIMITS)


def _respond(body: Any) -> None:
    to_records(to_chat(read_request(ResponsesRequest, body)), [[1, 2]], LIMITS)


def _body(name: str, read: Callable[[Any], Any], *seeds: dict[str, Any]) -> Target:
    def take(data: bytes) -> str:
        try:
            body = from_json(data)
        except ValueError:
            return "no JSON"
        try:
            read(body)
        except ServiceError as error:
            return str(error)
        return TAKEN

    def mutate(data: bytes, rng: Any) -> bytes:
        return mutate_json(data, rng) if rng.random() < 0.7 else mutate_bytes(data, rng)

    return Target(name, [json.dumps(seed).encode() for seed in seeds], take, mutate, 0.5)


SAMPLING = {"max_tokens": 5, "temperature": 0.5, "stop": ["a"], "n": 2, "seed": 1}
COMPLETION = {"model": MODEL, "prompt": "The sea", **SAMPLING}
FUNCTION = {"name": "sum", "description": "adds", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
    "max_completion_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": False,
    "logit_bias": {},
}
RESPONSE = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {"type": "function_call", "call_id": "1", "name": "sum", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
    ],
    "instructions": "Be brief.",
    "max_output_tokens": 9,
    "tools": [{"type": "function"} | FUNCTION],
    "reasoning": {"effort": "low"},
}
TOKENIZE, DETOKENIZE = {"prompt": "The sea", "add_special_tokens": False}, {"tokens": [1, 2, 3]}


def bodies() -> list[Target]:
    """Return a target for each kind of body of a request over HTTP."""
    listed = {"prompt": [[1, 2], [3]], "echo": True, "ignore_eos": True, "exactness": "approximate"}
    return [
        _body("completion", _complete, COMPLETION, listed),
        _body(
            "chat", _chat, CHAT, CHAT | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"}
        ),
        _body("response", _respond, RESPONSE, {"input": "Hello"}),
        _body("tokenize", partial(read_request, TokenizeRequest), TOKENIZE, {"messages": CHAT["messages"]}),
        _body("detokenize", partial(read_request, DetokenizeRequest), DETOKENIZE),
    ]


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]


def path_of(data: bytes) -> str:
    return PATHS[data[0] % len(PATHS)] if data else PATHS[0]


def gateway() -> Target:
    """Return a target that gives bodies to the whole HTTP application. Their first byte chooses the path."""
    router = ScriptedRouter(_tokenizer())
    observer = Observer(Metrics(MODEL), _tokenizer())
    limits = replace(LIMITS, max_context=256)
    frontend = Frontend(router, _tokenizer(), limits, observer, "tiny-draft")

    async def read_status() -> dict[str, None]:
        return {"target": None, "draft": None}

    app = make_app(frontend, read_status, lambda: {"target": "127.0.0.1:1", "draft": "127.0.0.1:2"})
    guarded = GuardedHttp(app, Callers([]), (), frontend, Proxies())
    loop = asyncio.new_event_loop()

    async def ask(data: bytes) -> int:
        path = path_of(data)
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
        scope["headers"] = [(b"content-type", b"application/json")]
        coming = [{"type": "http.request", "body": data[1:], "more_body": False}]
        statuses = []

        async def receive() -> Any:
            return coming.pop() if coming else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await guarded(scope, receive, send)
        assert statuses and statuses[0] < 500, f"{path}: {statuses}"
        assert not router.running, "a session is left"
        router.opened.clear()
        return statuses[0]

    def take(data: bytes) -> str:
        return f"{path_of(data)} {HTTPStatus(loop.run_until_complete(ask(data))).phrase}"

    def mutate(data: bytes, rng: Any) -> bytes:
        return data[:1] + (mutate_json(data[1:], rng) if rng.random() < 0.7 else mutate_bytes(data[1:], rng))

    given = [COMPLETION, CHAT, RESPONSE, TOKENIZE, DETOKENIZE]
    seeds = [bytes([place]) + json.dumps(body).encode() for place, body in enumerate(given)]
    return Target("http", seeds, take, mutate, 0.3)


def all_targets() -> list[Target]:
    """Return every target."""
    hostile = Target("hostile-draft", hostile_draft.seeds(), hostile_draft.take, hostile_draft.mutate, 0.02)
    return [*messages(), announcement(), hostile, *bodies(), gateway()]
