"""Every port of a launch refuses callers without the right key, token or certificate: real processes and
certificates."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from orchestrator.requests.keys import make_key
from protos import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from specahead.cli.main import main as specahead
from specahead.models import DRAFT, PLAN
from tests.certificates import Files, make_certificate
from tests.client import wait_for
from tests.stack import Stack, start_service

ASK = {"model": "tiny-target", "prompt": "The old man", "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Locked:
    """A launch with keys, certificates on its client ports, and mutual TLS and a token between its services."""

    stack: Stack
    key: str
    clients: Files
    services: Files
    expired: Files


@pytest.fixture(scope="module")
def locked(launch: Callable[..., Stack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("access")
    outside, inside = trustme.CA(), trustme.CA()
    clients, services = make_certificate(folder, "clients", outside), make_certificate(folder, "services", inside)
    key, line = make_key("alice")
    keys = folder / "keys"
    keys.write_text(line)
    stack = launch(
        "--api-keys-file", str(keys), "--tls", clients.keys("cert", "key"),
        "--service-tls", services.keys("cert", "key", "ca"), "--logging", '{"format": "json"}',
    )  # fmt: skip
    yield Locked(stack, key, clients, services, make_certificate(folder, "expired", inside, expired=True))
    stack.stop()


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def credentials(files: Files | None, ca: str) -> grpc.ChannelCredentials:
    """Return the credentials of a caller that trusts `ca` and shows a certificate, or none."""
    shown = (read(files.key), read(files.cert)) if files else (None, None)
    return grpc.ssl_channel_credentials(read(ca), *shown)


def call(address: str, method: str, bearer: str = "", tls: grpc.ChannelCredentials | None = None) -> grpc.StatusCode:
    """Return the status of a call. method: "client", "target" or "draft", the kind of the port."""
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else ()
    channel = grpc.secure_channel(address, tls) if tls else grpc.insecure_channel(address)
    with channel:
        calls = {
            "client": lambda: inference_pb2_grpc.InferenceStub(channel).ListModels(
                inference_pb2.ListModelsRequest(), metadata=metadata, timeout=10
            ),
            "target": lambda: control_pb2_grpc.TargetControlStub(channel).Status(
                control_pb2.StatusRequest(), metadata=metadata, timeout=10
            ),
            "draft": lambda: control_pb2_grpc.DraftControlStub(channel).Status(
                control_pb2.StatusRequest(), metadata=metadata, timeout=10
            ),
        }
        try:
            calls[method]()
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def ask(url: str, bearer: str, ca: str) -> tuple[int, dict[str, object]]:
    """Return status and body of a completion over HTTP."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(ASK).encode())
    request.add_header("Content-Type", "application/json")
    if bearer:
        request.add_header("Authorization", f"Bearer {bearer}")
    try:
        with urllib.request.urlopen(
            request, timeout=30, context=ssl.create_default_context(cafile=ca) if ca else None
        ) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_who_has_key_and_certificates_enters(locked: Locked, capsys: pytest.CaptureFixture[str]) -> None:
    stack = locked.stack
    assert stack.http.startswith("https://")
    assert ask(stack.http, locked.key, locked.clients.ca)[0] == 200
    specahead(["generate", "--url", stack.http, "--prompt", "The old man", "--max-tokens", "4",
               "--api-key", locked.key, "--tls-ca", locked.clients.ca])  # fmt: skip
    assert capsys.readouterr().out.strip()


def test_the_client_ports_refuse_without_the_key(locked: Locked) -> None:
    tls = credentials(None, locked.clients.ca)
    for bearer in ("", "sk-wrong", locked.key[:-1]):
        assert call(locked.stack.grpc, "client", bearer, tls) is grpc.StatusCode.UNAUTHENTICATED
        status, body = ask(locked.stack.http, bearer, locked.clients.ca)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert call(locked.stack.grpc, "client", locked.key, tls) is grpc.StatusCode.OK


@pytest.mark.parametrize("side", ["target", "draft"])
def test_the_service_ports_refuse_whom_the_authority_does_not_know(locked: Locked, side: str) -> None:
    """Certificates of clients do not count there, nor does a good one without the launch's token."""
    address = locked.stack.services[side][0]
    refused = {
        "plain text": None,
        "no certificate": credentials(None, locked.services.ca),
        "an expired one": credentials(locked.expired, locked.services.ca),
        "one of another authority": credentials(locked.clients, locked.services.ca),
    }
    for what, tls in refused.items():
        assert call(address, side, locked.key, tls) is grpc.StatusCode.UNAVAILABLE, what
    for bearer in ("", locked.key):
        tls = credentials(locked.services, locked.services.ca)
        assert call(address, side, bearer, tls) is grpc.StatusCode.UNAUTHENTICATED


def test_the_log_has_an_object_a_line_and_neither_key_nor_text(locked: Locked) -> None:
    text = locked.stack.output.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    done = [line for line in lines if line["message"] == "request done"]
    assert done and done[0]["key"] == "alice" and done[0]["tokens"] == 4
    assert any(line["message"] == "request refused" and line["code"] == "invalid_api_key" for line in lines)
    assert any(line["message"] == "loading the model" and line["service"] == "draft" for line in lines)
    assert locked.key not in text and "The old man" not in text


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_launch_makes_a_token_for_what_it_starts(stack: Stack, side: str) -> None:
    """Other users of the machine cannot use the services of a launch without flags."""
    for bearer in ("", "guess"):
        assert call(stack.services[side][0], side, bearer) is grpc.StatusCode.UNAUTHENTICATED


def test_a_draft_without_the_token_says_so(stack: Stack) -> None:
    model = ("--model", str(DRAFT), "--plan", str(PLAN), "--kv-tokens", "1000", "--port", "0")
    draft, address = start_service("-m", "draft_service", *model, "--target", stack.services["target"][0])
    try:
        with grpc.insecure_channel(address) as channel:
            stub = control_pb2_grpc.DraftControlStub(channel)
            wait_for(lambda: "token" in stub.Status(control_pb2.StatusRequest()).refusal, 60, "the refusal is told")
    finally:
        draft.kill()
        draft.wait()
