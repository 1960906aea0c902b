"""specahead.v1.Inference through the generated stubs: what it serves, what it refuses, what it leaves behind."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import control_pb2, inference_pb2
from tests.client import generate, make_request, service_state, wait_for_sessions
from tests.stack import Stack

PROMPT = "The old man looked at the sea and"
JSON = {"Content-Type": "application/json"}
ENDLESS: dict[str, Any] = {"max_tokens": 20_000, "ignore_eos": True}
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """Status and details of a call that fails. A stream is read to its end."""

    def run() -> None:
        answer = call()
        if isinstance(answer, grpc.Call):
            list(answer)

    with pytest.raises(grpc.RpcError) as caught:
        run()
    error: Any = caught.value
    return error.code(), error.details()


# What is served.


def test_generate(stack: Stack, tokenizer: Any) -> None:
    """The pieces add up; usage and the account of speculation come once, in the last message."""
    request = make_request(PROMPT, max_tokens=40, temperature=0, request_id="mine")
    *others, last = stack.stub().Generate(request)
    tokens = [token for response in [*others, last] for token in response.token_ids]
    assert len(others) > 3
    assert {response.request_id for response in [*others, last]} == {"mine"}
    assert "".join(response.text for response in [*others, last]) == tokenizer.decode(tokens)
    assert last.finish_reason == control_pb2.FINISH_REASON_LENGTH
    for response in others:
        assert not response.finish_reason
        assert not response.HasField("usage")
        assert not response.HasField("speculation")
    prompt_tokens = len(tokenizer.encode(PROMPT))
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt_tokens, 40, prompt_tokens + 40)
    assert len(tokens) == 40


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}])
def test_the_account_of_speculation_is_consistent(stack: Stack, sampling: dict[str, Any]) -> None:
    summary = generate(stack.stub(), PROMPT, max_tokens=80, **sampling).speculation
    at = list(summary.accepted_per_position)
    assert 0 < summary.accepted == sum(at) <= summary.drafted
    assert len(at) <= 4
    assert at == sorted(at, reverse=True), "a token is accepted only if those before it are"
    assert summary.rounds >= at[0]
    assert summary.rounds <= summary.drafted <= 4 * summary.rounds
    # Each round adds a token of the target's own; without a proposal there is that one only.
    assert summary.rounds + summary.plain_rounds + summary.accepted in (80, 81)  # the last round may be cut
    assert summary.kv_read_fraction == 1
    assert summary.announced_bytes == 0
    assert summary.verify_seconds > 0


@pytest.mark.parametrize("text", [PROMPT, "naïve 漢字 🙂\n\n\ttabs", " ", ""])
def test_tokenize(stack: Stack, tokenizer: Any, text: str) -> None:
    answer = stack.stub().Tokenize(inference_pb2.TokenizeRequest(text=text, model="tiny-target"))
    assert list(answer.token_ids) == tokenizer.encode(text)
    assert answer.max_model_len == 32768


def test_health_and_reflection(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="specahead.v1.Inference"),
        ]
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = stub.ServerReflectionInfo(iter(requests))
    names = {service.name for service in listed.list_services_response.service}
    assert {"specahead.v1.Inference", "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


# How requests end.


def test_abort(stack: Stack) -> None:
    """The running request ends with ABORT and its account; its id is taken until then and unknown after."""
    stub = stack.stub()
    call = stub.Generate(make_request(PROMPT, request_id="to-abort", **ENDLESS))
    next(call)
    code, details = refused(lambda: stub.Generate(make_request(PROMPT, request_id="to-abort")))
    assert code is INVALID
    assert "to-abort" in details
    abort = inference_pb2.AbortRequest(request_id="to-abort")
    stub.Abort(abort)
    last = list(call)[-1]
    assert last.finish_reason == control_pb2.FINISH_REASON_ABORT
    assert last.usage.completion_tokens > 0
    assert len(generate(stub, PROMPT, max_tokens=3, request_id="to-abort").tokens) == 3, "free at once"
    wait_for_sessions(stack.http, 0)
    code, details = refused(lambda: stub.Abort(abort))
    assert code is NOT_FOUND
    assert "to-abort" in details


def test_abort_ends_a_request_that_came_over_http(stack: Stack) -> None:
    fields = {"prompt": PROMPT, "stream": True, "request_id": "over-http"} | ENDLESS
    request = urllib.request.Request(f"{stack.http}/v1/completions", json.dumps(fields).encode(), JSON)
    with urllib.request.urlopen(request, timeout=30) as response:
        response.readline()
        stack.stub().Abort(inference_pb2.AbortRequest(request_id="over-http"))
        events = [line.removeprefix(b"data: ") for line in response if line.strip()]
    assert events[-1].strip() == b"[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
    wait_for_sessions(stack.http, 0)


def test_a_deadline_ends_the_session_on_both_services(stack: Stack) -> None:
    call = stack.stub().Generate(make_request(PROMPT, **ENDLESS), timeout=5)
    assert next(call).token_ids
    assert refused(lambda: call)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for_sessions(stack.http, 0)


# So long that it is beyond the context, which its size does not tell: it has to be tokenized.
LONG = PROMPT * 12_000


def test_a_long_text_holds_nobody_up(stack: Stack) -> None:
    """While a text of 400 KB is tokenized, others get their answers."""
    stub = stack.stub()

    def tokenize() -> None:
        with pytest.raises(grpc.RpcError, match=r"your prompt has \d+"):
            stack.stub().Tokenize(inference_pb2.TokenizeRequest(text=LONG))

    stub.ListModels(inference_pb2.ListModelsRequest())
    began, longest = time.monotonic(), 0.0
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(tokenize)
        while not job.done():
            asked = time.monotonic()
            stub.ListModels(inference_pb2.ListModelsRequest())
            longest = max(longest, time.monotonic() - asked)
        job.result()
    assert longest < 0.5 * (time.monotonic() - began)


# What is refused.

BAD_REQUESTS: dict[str, tuple[inference_pb2.GenerateRequest, str]] = {
    "no prompt": (inference_pb2.GenerateRequest(max_tokens=1), "prompt"),
    "over-long text": (make_request("a " * 100_000), "context"),
    "far over-long text": (make_request("a " * 2_000_000), "characters"),
    "NaN temperature": (make_request(PROMPT, temperature=float("nan")), "temperature"),
    "exactness 9": (make_request(PROMPT, exactness=9), "exactness"),
    "unprintable request_id": (make_request(PROMPT, request_id="a\nb"), "request_id"),
    # gRPC drops a status whose details are long, so they must not quote all of this.
    "a stop of megabytes": (make_request(PROMPT, stop=["字" * 1_000_000]), "stop"),
}


def test_an_unknown_model_is_not_found(stack: Stack) -> None:
    stub = stack.stub()
    for name in ("gpt-9", "字" * 100_000):
        for ask in (
            lambda n=name: stub.Generate(make_request(PROMPT, model=n)),
            lambda n=name: stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT, model=n)),
        ):
            code, details = refused(ask)
            assert code is NOT_FOUND, details
            assert name[:100] in details


def test_bad_requests_do_no_harm_to_others(stack: Stack) -> None:
    """A stream goes on as if alone while all of the above, and the strangest that is allowed, arrive."""
    stub, others = stack.stub(), stack.stub()
    fields: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
    expected = generate(stub, PROMPT, **fields).tokens
    names = [("target", "pid"), ("draft", "pid")]
    before = [service_state(stack.http, *name) for name in names]
    said = len(stack.output.read_text())

    call = stub.Generate(make_request(PROMPT, temperature=0, **fields))
    tokens = list(next(call).token_ids)
    for request, reason in BAD_REQUESTS.values():
        code, details = refused(lambda r=request: others.Generate(r))
        assert code is INVALID and reason in details, details
    for strange in (
        {"top_p": 1e-45},
        {"temperature": 1e-45},
        {"temperature": -0.0},
        {"seed": 2**64 - 1},
        {"request_id": "字" * 120},
    ):
        assert generate(others, "\0", max_tokens=2, **strange).tokens
    for response in call:
        tokens += response.token_ids
    assert tokens == expected
    assert [service_state(stack.http, *name) for name in names] == before
    lines = stack.output.read_text()[said:].splitlines()
    assert all(" orchestrator.sessions.observer: request " in line for line in lines), (
        lines
    )  # nothing but the requests' own
    wait_for_sessions(stack.http, 0)
