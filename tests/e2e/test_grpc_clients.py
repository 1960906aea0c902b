"""specahead.v1.Inference through the generated stubs, the command line, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2
from sparsity.plan import save_plan, uniform_plan
from tests.client import generate, make_request, wait_until_idle
from tests.stack import ROOT, Stack

PROMPT = "The old man looked at the sea and"


def _refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    error: Any = refused.value
    return error.code(), error.details()


def test_generate(stack: Stack, tokenizer: Any) -> None:
    stub = stack.stub()
    responses = list(stub.Generate(make_request(PROMPT, max_tokens=40, temperature=0, request_id="mine")))
    last = responses[-1]
    tokens = [token for response in responses for token in response.token_ids]
    assert {response.request_id for response in responses} == {"mine"}
    assert "".join(response.text for response in responses) == tokenizer.decode(tokens)
    assert last.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert last.usage.completion_tokens == len(tokens) == 40
    summary = last.speculation
    assert 0 < summary.accepted <= summary.drafted
    assert sum(summary.accepted_per_position) == summary.accepted
    assert list(summary.accepted_per_position) == sorted(summary.accepted_per_position, reverse=True)
    assert summary.kv_read_fraction == 1
    assert generate(stub, tokenizer.encode(PROMPT), max_tokens=40).tokens == tokens


def test_abort(stack: Stack) -> None:
    stub = stack.stub()
    call = stub.Generate(make_request(PROMPT, max_tokens=20_000, ignore_eos=True, request_id="to-abort"))
    next(call)
    code, details = _refused(stub.Generate(make_request(PROMPT, request_id="to-abort")))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "to-abort" in details
    stub.Abort(inference_pb2.AbortRequest(request_id="to-abort"))
    last = list(call)[-1]
    assert last.finish_reason == 3
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Abort(inference_pb2.AbortRequest(request_id="to-abort"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    wait_until_idle(stack.http)


def test_deadline_and_cancel_end_the_session_on_both_services(stack: Stack) -> None:
    stub = stack.stub()
    request = make_request(PROMPT, max_tokens=20_000, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as late:
        list(stub.Generate(request, timeout=1.0))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    wait_until_idle(stack.http)
    call = stub.Generate(request)
    next(call)
    call.cancel()
    wait_until_idle(stack.http)


def test_models_tokenize_health_reflection(stack: Stack, tokenizer: Any) -> None:
    stub = stack.stub()
    (model,) = stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert (model.id, model.vocab_size) == ("tiny-target", 4096)
    answer = stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT))
    assert list(answer.token_ids) == tokenizer.encode(PROMPT)
    with grpc.insecure_channel(stack.grpc) as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        assert "specahead.v1.Inference" in [s.name for s in listed.list_services_response.service]


NAN = float("nan")
BAD_REQUESTS = {
    "no prompt": (inference_pb2.GenerateRequest(max_tokens=1), "prompt"),
    "empty text": (make_request(""), "empty"),
    "no tokens": (make_request([]), "empty"),
    "token out of range": (make_request([4096]), "vocabulary"),
    "token 2^32 - 1": (make_request([2**32 - 1]), "vocabulary"),
    "over-long": (make_request([5] * 40_000), "context"),
    "NaN temperature": (make_request(PROMPT, temperature=NAN), "temperature"),
    "negative temperature": (make_request(PROMPT, temperature=-1), "temperature"),
    "NaN top_p": (make_request(PROMPT, top_p=NAN), "top_p"),
    "top_p 2": (make_request(PROMPT, top_p=2), "top_p"),
    "max_tokens 0": (make_request(PROMPT, max_tokens=0), "max_tokens"),
    "max_tokens 2^31": (make_request(PROMPT, max_tokens=2**31), "max_tokens"),
    "exactness 9": (make_request(PROMPT, exactness=9), "exactness"),
    "too many stops": (make_request(PROMPT, stop=["a"] * 17), "stop"),
    "empty stop": (make_request(PROMPT, stop=[""]), "stop"),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_bad_input_is_invalid_argument_with_the_reason(stack: Stack, what: str) -> None:
    request, reason = BAD_REQUESTS[what]
    code, details = _refused(stack.stub().Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in details


def test_unknown_model_is_not_found(stack: Stack) -> None:
    code, details = _refused(stack.stub().Generate(make_request(PROMPT, model="gpt-9")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "gpt-9" in details


@pytest.mark.parametrize("data", [b"\x1a\x02\xff\xfe", b"\x1a\x7fcut off"])
def test_bytes_that_are_no_message_are_invalid_argument(stack: Stack, data: bytes) -> None:
    """Bad UTF-8 in the prompt, and a field that is cut off."""
    with grpc.insecure_channel(stack.grpc) as channel:
        call = channel.unary_stream("/specahead.v1.Inference/Generate")(data)
        assert _refused(call)[0] is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/specahead.v1.Inference/Abort")(b"\x0a\x02\xff\xfe")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert generate(stack.stub(), PROMPT, max_tokens=3).tokens


def _run(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=120
    )


def test_command_line_generate(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    common = ("--address", stack.grpc, "--max-tokens", "20", "--temperature", "0")
    expected = generate(stack.stub(), PROMPT, max_tokens=20)
    for source, stdin in (("--prompt", PROMPT), ("--prompt-file", str(file)), ("-", PROMPT)):
        given = (source,) if source == "-" else (source, stdin)
        done = _run("orchestrator.cli", "generate", *common, *given, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected.text + "\n"
    done = _run(
        "orchestrator.cli", "generate", *common, "--prompt", PROMPT, "--json", "--exactness", "approximate"
    )
    answer = json.loads(done.stdout)
    assert set(answer) == {"text", "token_ids", "prompt_tokens", "finish_reason", "usage", "speculation"}
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == 20
    assert {
        "rounds", "drafted", "accepted", "accepted_per_position", "stale_rounds", "announced_bytes", "kv_read_fraction"
    } <= set(answer["speculation"])  # fmt: skip


def test_command_line_errors(stack: Stack, tmp_path: Path) -> None:
    """One line that says what is wrong, and a non-zero exit."""
    plan = tmp_path / "plan.json"
    save_plan(uniform_plan(3, 2, 2, 2), plan)
    port = stack.grpc.rsplit(":", 1)[1]
    cases = [
        (("orchestrator.cli", "generate", "--address", "127.0.0.1:1", "--prompt", "x"), "UNAVAILABLE"),
        (("orchestrator.cli", "generate", "--address", stack.grpc, "--prompt", ""), "empty"),
        (("orchestrator.cli", "generate", "--address", stack.grpc, "--prompt-file", "/no/such"), "/no/such"),
        (("orchestrator.launch", "--gamma", "many"), "gamma"),
        (("orchestrator.launch", "--config", "/no/such.yaml"), "/no/such.yaml"),
        (("orchestrator.launch", "--target-address", "127.0.0.1:1", "--grpc-port", port), port),
    ]
    for command, reason in cases:
        done = _run(*command)
        assert done.returncode != 0
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert reason in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    done = _run("target_service", "--model", str(ROOT / "models/tiny-target"), "--plan", str(plan))
    assert done.returncode != 0
    assert "(3, 2)" in done.stderr.splitlines()[-1]


def test_dry_run_prints_the_settings() -> None:
    done = _run("orchestrator.launch", "--dry-run", "--gamma", "6")
    assert json.loads(done.stdout)["gamma"] == 6
