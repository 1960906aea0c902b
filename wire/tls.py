"""Certificates: read, and tried before a port opens, so that a bad one is named at the start and not by each peer."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from config import SettingsError


@dataclass(frozen=True)
class Tls:
    """What a process shows to its peers, and whom it trusts; PEM. ca None: the public authorities."""

    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    ca: bytes | None = None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of one who dials: the peer's certificate must fit, and our own is shown if there is one."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of one who listens: with `ca` each client must show a certificate that it signed."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=self.ca is not None)


def read_tls(cert: str, key: str, ca: str = "") -> Tls | None:
    """Read PEM files; None if no path is given.

    Raises SettingsError for files that cannot be read or are no PEM, a key of another certificate, a certificate that
    has expired or is not valid yet, and one that `ca` did not sign.
    """
    if not (cert or ca):
        return None
    content = [_read(path) if path else None for path in (cert, key, ca)]
    try:
        if cert:
            _try(cert, key, ca)
        else:
            ssl.create_default_context(cafile=ca)
    except ssl.SSLCertVerificationError as error:
        raise SettingsError(f"TLS certificate {cert}: {error.verify_message}") from None
    except ssl.SSLError as error:
        files = ", ".join(path for path in (cert, key, ca) if path)
        reason = (error.reason or "no PEM").lower().replace("_", " ")
        raise SettingsError(
            f"TLS files {files}: {reason}; expected PEM, the key being that of the certificate"
        ) from None
    return Tls(*content)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"TLS file {path} cannot be read: {error.strerror}") from None


def _try(cert: str, key: str, ca: str) -> None:
    """Shake hands with ourselves in memory; raises ssl.SSLError, as a peer would see it.

    Without `ca` the certificate itself is trusted, so that only its dates and its key are tried.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(ca or cert)
    server.load_cert_chain(cert, key, password="")  # never ask for one at the terminal
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
