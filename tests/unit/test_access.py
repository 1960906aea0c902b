"""Who may call a gRPC port: tokens, certificates, what is refused and in which words."""

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from orchestrator.api.http_requests import open_paths
from orchestrator.api.http_server import Connections, serve_http
from protos import control_pb2, control_pb2_grpc
from specahead.config import SettingsError
from specahead.config.access import (
    Certificates,
    ClientAccess,
    Http,
    ServiceCertificates,
    check_client_listener,
    check_service_listener,
)
from specahead.wire.access import PeerAccess, bearer_of, peer_of
from specahead.wire.server import RunningServer, start_server
from specahead.wire.tls import Tls, read_tls
from tests.certificates import Files, make_certificate
from tests.settings import target_settings
from tests.unit.test_router import Target

AUTHORITY, STRANGER = trustme.CA(), trustme.CA()
TOKEN = "the-token-of-this-deployment"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_certificate(tmp_path_factory.mktemp("tls"), "good", AUTHORITY)


def tls(files: Files) -> Tls:
    read = read_tls(files.cert, files.key, files.ca)
    assert read is not None
    return read


def untried(files: Files) -> Tls:
    """What `read_tls` would refuse to load."""
    return Tls(*(Path(path).read_bytes() for path in (files.cert, files.key, files.ca)))


class Control(control_pb2_grpc.DraftControlServicer):
    async def Status(self, request: Any, context: Any) -> control_pb2.ServiceStatus:
        return control_pb2.ServiceStatus(peer=peer_of(context))


async def start(access: PeerAccess, target: Target | None = None, port: int = 0) -> RunningServer:
    """Serve the control of a draft, and of a target if there is one."""
    services: list[Any] = [
        (control_pb2_grpc.add_DraftControlServicer_to_server, Control(), "specahead.v1.DraftControl")
    ]
    if target is not None:
        services.append((control_pb2_grpc.add_TargetControlServicer_to_server, target, "specahead.v1.TargetControl"))
    return await start_server("127.0.0.1", port, services, access.guard())


async def call(access: PeerAccess, server: RunningServer) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    async with access.dial(server.address) as channel:
        stub = control_pb2_grpc.DraftControlStub(channel)
        try:
            await stub.Status(control_pb2.StatusRequest(), metadata=access.metadata, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""


async def test_a_token_is_asked_for_before_anything_is_read() -> None:
    """Health stays open: probes bring no token."""
    server = await start(PeerAccess(TOKEN))
    assert (await call(PeerAccess(TOKEN), server))[0] is grpc.StatusCode.OK
    for given, reason in (("", "none was sent"), (TOKEN[:-1], "not that of this deployment")):
        code, details = await call(PeerAccess(given), server)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert reason in details and TOKEN not in details
    async with PeerAccess().dial(server.address) as channel:
        silent = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=10)
        assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED  # it never wrote
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    await server.stop(0)


@pytest.mark.parametrize(
    ("value", "token"), [("Bearer a", "a"), ("bearer  a ", "a"), ("Basic a", ""), ("a", ""), ("", ""), ("Bearer", "")]
)
def test_bearer(value: str, token: str) -> None:
    assert bearer_of(value) == token


async def test_mutual_tls_admits_who_shows_a_certificate_of_the_authority(files: Files, tmp_path: Path) -> None:
    server = await start(PeerAccess(tls=tls(files)))
    assert (await call(PeerAccess(tls=tls(files)), server))[0] is grpc.StatusCode.OK
    ours = tls(files).ca
    strange = tls(make_certificate(tmp_path, "strange", STRANGER))
    expired = untried(make_certificate(tmp_path, "old", AUTHORITY, expired=True))
    refused = {
        "no certificate": PeerAccess(tls=Tls(ca=ours)),
        "a stranger's": PeerAccess(tls=Tls(strange.cert, strange.key, ours)),
        "an expired one": PeerAccess(tls=expired),
        "another authority trusted": PeerAccess(tls=strange),
        "plain text": PeerAccess(),
    }
    for what, access in refused.items():
        assert (await call(access, server))[0] is grpc.StatusCode.UNAVAILABLE, what
    await server.stop(0)


@pytest.mark.parametrize("is_certified", [True, False])
async def test_a_peer_is_whom_its_certificate_names_or_where_it_calls_from(is_certified: bool, tmp_path: Path) -> None:
    """The port does not count, since it is another one for each connection."""
    server, access = await start(PeerAccess()), PeerAccess()
    if is_certified:
        await server.stop(0)
        server = await start(PeerAccess(tls=tls(make_certificate(tmp_path, "server", AUTHORITY))))
        access = PeerAccess(tls=tls(make_certificate(tmp_path, "caller", AUTHORITY, hosts=["gateway-7", "cluster"])))
    for _ in range(2):
        async with access.dial(server.address) as channel:
            status = await control_pb2_grpc.DraftControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)
        assert status.peer == ("cluster, gateway-7" if is_certified else "ipv4:127.0.0.1")
    await server.stop(0)


def renew(files: Files, authority: trustme.CA) -> None:
    """Put a new certificate in the place of another."""
    make_certificate(Path(files.cert).parent, Path(files.cert).name.removesuffix("-cert.pem"), authority)


def spoil(files: Files) -> None:
    Path(files.key).write_text("no key")


async def test_new_certificates_count_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This holds for gRPC and HTTP. Whoever is connected stays, and files that cannot be used change nothing."""
    files = make_certificate(tmp_path, "renewed", AUTHORITY)
    old, new = tls(files), tls(make_certificate(tmp_path, "other", STRANGER))
    shown = read_tls(files.cert, files.key, files.ca)
    server = await start(PeerAccess(tls=shown))
    async with (
        PeerAccess(tls=Tls(old.cert, old.key, old.ca)).dial(server.address) as channel,
        serve_http(page, "127.0.0.1", 0, Connections(10), shown) as http,
    ):
        connected = control_pb2_grpc.DraftControlStub(channel)
        await connected.Status(control_pb2.StatusRequest(), timeout=10)
        assert await trusts(http, old) and not await trusts(http, new)
        spoil(files)
        assert await trusts(http, old) and (await call(PeerAccess(tls=old), server))[0] is grpc.StatusCode.OK
        assert "cannot be used; those from before still count" in caplog.text
        renew(files, STRANGER)
        assert await trusts(http, new) and not await trusts(http, old)
        assert (await call(PeerAccess(tls=new), server))[0] is grpc.StatusCode.OK
        assert (await call(PeerAccess(tls=shown), server))[0] is grpc.StatusCode.OK  # it dials with what is there now
        assert (await call(PeerAccess(tls=Tls(old.cert, old.key, old.ca)), server))[0] is grpc.StatusCode.UNAVAILABLE
        await connected.Status(control_pb2.StatusRequest(), timeout=10)
    await server.stop(0)


async def page(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def trusts(address: str, authority: Tls) -> bool:
    """Whether somebody who trusts an authority alone takes the certificate at an address."""
    context = ssl.create_default_context(cadata=(authority.ca or b"").decode())
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(address, ssl=context) as response:
                return response.status == 200
        except aiohttp.ClientConnectorCertificateError:
            return False


def test_certificates_that_no_peer_would_take_are_refused_at_the_start(files: Files, tmp_path: Path) -> None:
    old = make_certificate(tmp_path, "old", AUTHORITY, expired=True)
    other = make_certificate(tmp_path, "other", STRANGER)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    cases = [
        ((old.cert, old.key, ""), f"{old.cert}: certificate has expired"),
        ((old.cert, old.key, old.ca), f"{old.cert}: certificate has expired"),
        ((files.cert, files.key, other.ca), "unable to get local issuer certificate"),
        ((files.cert, other.key, ""), "key values mismatch"),
        ((str(tmp_path / "none.pem"), files.key, ""), r"none.pem cannot be read: No such file"),
        ((str(text), files.key, ""), "text.pem"),
        ((files.cert, str(text), ""), "text.pem"),
        (("", "", str(text)), "text.pem"),
    ]
    for paths, reason in cases:
        with pytest.raises(SettingsError, match=reason):
            read_tls(*paths)
    assert read_tls("", "") is None


def test_a_listener_off_loopback_asks_who_calls() -> None:
    """A server's own certificate says who answers, not who calls."""
    pair, mutual = ServiceCertificates(cert="a", key="b"), ServiceCertificates(cert="a", key="b", ca="c")
    for open_one in (target_settings(), target_settings(service_tls=pair)):
        with pytest.raises(SettingsError, match=r"host is '0.0.0.0'.*--insecure"):
            check_service_listener(open_one, "0.0.0.0")
        check_service_listener(open_one, "127.0.0.1")
    for asked in ({"service_token": "a"}, {"service_token_file": "a"}, {"service_tls": mutual}, {"insecure": True}):
        check_service_listener(target_settings(**asked), "0.0.0.0")
    with pytest.raises(SettingsError, match="--api-keys-file"):
        check_client_listener(ClientAccess(tls=Certificates(cert="a", key="b")), "::")
    for asked in ({"api_key": "a"}, {"api_keys_file": "a"}, {"insecure": True}):
        check_client_listener(ClientAccess(**asked), "::")


def test_metrics_are_behind_the_key_unless_told_otherwise() -> None:
    assert "/metrics" not in open_paths(ClientAccess())
    opened = open_paths(ClientAccess(http=Http(open_metrics=True)))
    assert opened == ("/", "/live", "/ready", "/health", "/dashboard", "/metrics")
