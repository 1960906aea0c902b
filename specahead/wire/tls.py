"""Certificates. They are tried before a port opens, so that a bad one is named at the start and not by each peer.

A server checks at each handshake whether their files have changed, so that new ones count without a restart.
"""

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from specahead.config import SettingsError
from specahead.wire.files import Version, version_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tls:
    """The certificate that a process shows to its peers, and the authorities that it trusts, as PEM."""

    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    ca: bytes | None = None
    """None: the public authorities."""
    files: tuple[str, ...] = ()
    """The files of certificate, key and authorities; "" for none."""
    versions: tuple[Version | None, ...] = field(default=(), repr=False)
    """Of these files, before they were read."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return a client's credentials: it checks the peer's certificate, and shows its own if it has one."""
        tls = Renewal(self).take() or self
        return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return a server's credentials: with `ca` each client must show a certificate that it signed."""
        renewal = Renewal(self)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            tls = renewal.take()
            return None if tls is None else tls._shown()

        return grpc.dynamic_ssl_server_credentials(self._shown(), changed, self.ca is not None)

    def _shown(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server on asyncio, which asks no client for a certificate."""
        renewal, newest = Renewal(self), _server_context(*self.files[:2])

        def choose(connection: Any, *_: object) -> None:
            nonlocal newest
            if renewal.take() is not None:
                newest = _server_context(*self.files[:2])
            connection.context = newest

        context = _server_context(*self.files[:2])
        context.sni_callback = choose  # type: ignore[assignment]  # called at each handshake, with a name or without
        return context


class Renewal:
    """Reads certificates again when their files have changed."""

    def __init__(self, tls: Tls) -> None:
        self._files, self._seen = tls.files, tls.versions

    def take(self) -> Tls | None:
        """Return the certificates if they have changed since the last call; else None.

        None, too, if the new ones cannot be used: the log says so, and the old ones still count.
        """
        versions = tuple(map(version_of, self._files))
        if versions == self._seen:
            return None
        self._seen = versions
        try:
            tls = read_tls(*self._files)
        except SettingsError as error:
            log.error("certificates have changed and cannot be used; those from before still count: %s", error)
            return None
        log.info("certificates have changed and are read again", extra={"certificate": self._files[0]})
        return tls


def read_tls(cert: str, key: str, ca: str = "") -> Tls | None:
    """Read PEM files; None if no path is given.

    Raises SettingsError for files that cannot be read or are no PEM, a key of another certificate, a certificate that
    has expired or is not valid yet, and one that `ca` did not sign.
    """
    if not (cert or ca):
        return None
    files = cert, key, ca
    versions = tuple(map(version_of, files))
    cert_pem, key_pem, ca_pem = (_read(path) if path else None for path in files)
    try:
        if cert:
            _try(cert, key, ca)
        else:
            ssl.create_default_context(cafile=ca)
    except ssl.SSLCertVerificationError as error:
        raise SettingsError(f"TLS certificate {cert}: {error.verify_message}") from None
    except ssl.SSLError as error:
        named = ", ".join(filter(None, files))
        reason = (error.reason or "no PEM").lower().replace("_", " ")
        raise SettingsError(
            f"TLS files {named}: {reason}; expected PEM, the key being that of the certificate"
        ) from None
    return Tls(cert_pem, key_pem, ca_pem, files, versions)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"TLS file {path} cannot be read: {error.strerror}") from None


def _server_context(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, password="")  # never ask for one at the terminal
    return context


def _try(cert: str, key: str, ca: str) -> None:
    """Shake hands with ourselves in memory; raises ssl.SSLError, as a peer would see it.

    Without `ca` the certificate itself is trusted, so that only its dates and its key are tried.
    """
    server, client = _server_context(cert, key), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(ca or cert)
    if ca:
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(ca)
        client.load_cert_chain(cert, key, password="")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for side in (*sides, *sides):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
