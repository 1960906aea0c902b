"""The settings that every process has: who may use its ports, its log, its timeouts."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from specahead.config.setting import SECRET, Keyed, Seconds, Section, SettingsError, Within


def split_list(text: str) -> list[str]:
    """Return the entries of a list that commas separate."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


@dataclass(frozen=True, kw_only=True)
class Logging(Keyed, group="logs"):
    """The log and the traces of a process."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important messages that are written."""
    format: Literal["text", "json"] = "text"
    """json: one object a line."""
    requests: bool = False
    """Whether prompts and answers are written to the log."""
    trace_share: Annotated[float, Within(least=0, most=1)] = 0.0
    """Share of requests that OpenTelemetry traces; OTEL_EXPORTER_OTLP_ENDPOINT says where spans go."""


@dataclass(frozen=True, kw_only=True)
class Certificates(Keyed, group="access of clients"):
    """The TLS of the client endpoints."""

    cert: str = ""
    """File of the certificate (PEM, with its chain)."""
    key: str = ""
    """File of its private key (PEM)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.cert) != bool(self.key):
            given, missing = ("cert", "key") if self.cert else ("key", "cert")
            raise SettingsError(f"{given} is given without {missing}: TLS needs both")


@dataclass(frozen=True, kw_only=True)
class ServiceCertificates(Certificates, group="access between services"):
    """The TLS of the services, on both ends of a connection."""

    ca: str = ""
    """File of the certificates (PEM) that sign those of the services; each side must then show its own."""
    name: str = ""
    """Name in the certificates of services; empty: the address that is dialled."""


@dataclass(frozen=True, kw_only=True)
class Http(Keyed, group="access of clients"):
    """Limits of the HTTP endpoint."""

    max_connections: Annotated[int, Within(least=2)] = 1000
    """Connections at once, half of them from one address."""
    allowed_hosts: str = ""
    """Names, separated by commas, that the Host header may have where the endpoint binds loopback, beside localhost and
    loopback addresses; *: any."""
    trusted_proxies: str = ""
    """Addresses or networks, separated by commas, of proxies whose X-Forwarded-For names the caller."""
    open_metrics: bool = False
    """Whether /metrics is answered without a key."""
    response_store: str = ""
    """File (SQLite) that keeps responses, which later requests continue by previous_response_id; empty: none."""
    response_hours: Annotated[float, Within(above=0)] = 24.0
    """Hours that a response is kept after its last use."""
    response_gib: Annotated[float, Within(above=0)] = 1.0
    """GiB of kept responses; the least recently used ones go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in split_list(self.trusted_proxies):
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise SettingsError(
                    f"trusted_proxies: {error}; expected addresses or networks such as 10.0.0.7,10.1.0.0/16"
                ) from None


@dataclass(frozen=True, kw_only=True)
class Timeouts(Keyed, group="client endpoints"):
    """How long things may take, in seconds."""

    request: Seconds = 3600.0
    """A request in all; 0: any time."""
    resume: Seconds = 60.0
    """How long requests wait for a lost target before they fail, and a target keeps the requests of a lost gateway."""
    shutdown: Seconds = 10.0
    """How long requests in flight get to finish at shutdown."""
    connect: Seconds = 30.0
    """How long target and draft may take to be found at the start; 0: any time."""
    step: Annotated[float, Within(above=0)] = 120.0
    """How long one step of a model may take before its service ends itself as hung."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(Section, group="every process"):
    """What every process of specahead has."""

    logging: Logging = Logging()
    """Log and traces, as JSON or a mapping."""
    timeouts: Timeouts = Timeouts()
    """How long things may take, in seconds, as JSON or a mapping."""
    insecure: bool = False
    """Listen beyond this machine although nobody is asked who they are."""


@dataclass(frozen=True, kw_only=True)
class _ServiceAccess(ProcessSettings, group="access between services"):
    service_token_file: str = ""
    """File of the token that orchestrator, draft and target share; empty: a launch makes one for its services."""
    service_tls: ServiceCertificates = ServiceCertificates()
    """Certificates of the services and of their callers, as JSON or a mapping."""


@dataclass(frozen=True, kw_only=True)
class ServiceAccess(_ServiceAccess):
    """How orchestrator, draft and target know one another: by a shared token, by certificates, or by both."""

    service_token: str = field(default="", repr=False)
    """The token that a launch made."""

    def read_token(self) -> str:
        """The shared token; "" if there is none. Raises SettingsError for a file that cannot be read or is empty."""
        return self.service_token or read_secret(self.service_token_file, "service_token_file")


@dataclass(frozen=True, kw_only=True)
class ClientAccess(ProcessSettings, group="access of clients"):
    """Who may use the client endpoints, and their TLS."""

    api_key: Annotated[str, SECRET] = field(default="", repr=False)
    """Key that clients must send, as `Authorization: Bearer KEY`."""
    api_keys_file: str = ""
    """File of the names, hashes and limits of keys, one a line (`specahead key`)."""
    tls: Certificates = Certificates()
    """Certificate and key of the client endpoints, as JSON or a mapping."""
    allowed_origins: str = ""
    """Origins of web pages that may call the HTTP endpoint in a browser (CORS), separated by commas; *: any."""
    http: Http = Http()
    """Limits of the HTTP endpoint, as JSON or a mapping."""


def check_service_listener(access: ServiceAccess, host: str) -> None:
    """Raise SettingsError if a service would answer other machines without asking who they are."""
    asked = access.service_token or access.service_token_file or (access.service_tls.cert and access.service_tls.ca)
    _check_listener(
        access, host, asked, "--service-token-file FILE, or --service-tls with cert, key and ca for mutual TLS"
    )


def check_client_listener(access: ClientAccess, host: str) -> None:
    """Raise SettingsError if the client endpoints would answer other machines without asking who they are."""
    asked = access.api_key or access.api_keys_file
    _check_listener(access, host, asked, "--api-keys-file FILE (`specahead key` makes its lines)")


def _check_listener(access: ProcessSettings, host: str, asked: object, remedy: str) -> None:
    if not (asked or access.insecure or is_loopback(host)):
        raise SettingsError(
            f"host is {host!r}, which other machines can reach, and nobody is asked who they are: give {remedy}; or "
            "--insecure if the network keeps strangers out"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. Of names, only localhost counts as loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_secret(path: str, name: str) -> str:
    """Return the text of a file without the white space around it; "" if path is "". Raises SettingsError."""
    if not path:
        return ""
    secret = read_text(path, name).strip()
    if not secret.isascii() or not secret.isprintable() or not secret or " " in secret:
        raise SettingsError(f"{name} {path}: expected one word of printable ASCII characters")
    return secret


def read_text(path: str, name: str) -> str:
    """Return the text of a file. Raises SettingsError, which names the setting, if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
