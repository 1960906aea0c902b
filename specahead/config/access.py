"""Who may enter a port, and what a process writes to its log: the settings that every process has."""

import ipaddress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specahead.config.setting import Section, SettingsError, setting

LOG_LEVELS = ("debug", "info", "warning", "error")

_logs = partial(setting, group="logs")
_between = partial(setting, group="access between services")
_clients = partial(setting, group="access of clients")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(Section):
    """What every process of specahead has."""

    log_level: str = _logs(
        "info", f"least important messages that are written: {', '.join(LOG_LEVELS)}", choices=LOG_LEVELS
    )
    log_format: str = _logs("text", "text, or json for one object a line", choices=("text", "json"))
    insecure: bool = setting(
        False, "listen beyond this machine although nobody is asked who they are", group="access between services"
    )


@dataclass(frozen=True, kw_only=True)
class ServiceAccess(ProcessSettings):
    """How orchestrator, draft and target know one another: by a token that all have, by certificates, or by both."""

    service_token: str = _between(
        "", "token that orchestrator, draft and target share; empty: a launch makes one for what it starts", secret=True
    )
    service_token_file: str = _between("", "file that holds the token")
    tls_cert: str = _between(
        "", "certificate (PEM, with its chain) of the services and of who dials them", name="service_tls_cert"
    )
    tls_key: str = _between("", "its private key (PEM)", name="service_tls_key")
    tls_ca: str = _between(
        "", "certificates (PEM) that sign those of the services; each side must then show one", name="service_tls_ca"
    )
    tls_name: str = _between(
        "", "name that certificates of services bear; empty: the address that is dialled", name="service_tls_name"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.service_token and self.service_token_file:
            raise SettingsError("service_token and service_token_file are both given: give one")
        check_pair(self.tls_cert, self.tls_key, "service_")

    def read_token(self) -> str:
        """The shared token; "" if there is none. Raises SettingsError for a file that cannot be read or is empty."""
        return self.service_token or read_secret(self.service_token_file, "service_token_file")


@dataclass(frozen=True, kw_only=True)
class ClientAccess(ProcessSettings):
    """Who may use the client endpoints, and whether what they say can be read on the way."""

    api_key: str = _clients("", "key that clients must send, as `Authorization: Bearer KEY`", secret=True)
    api_keys_file: str = _clients("", "file of the names, hashes and limits of keys, one a line (`specahead key`)")
    open_metrics: bool = _clients(False, "answer /metrics without a key")
    trusted_proxies: str = _clients(
        "",
        "addresses or networks, separated by commas, of proxies in front of the client endpoints: of what comes from "
        "them X-Forwarded-For says who called",
    )
    allowed_hosts: str = _clients(
        "",
        "names, separated by commas, that the Host header may have where the endpoints bind loopback, beside localhost "
        "and loopback addresses; *: any",
    )
    tls_cert: str = _clients("", "certificate (PEM, with its chain) of the client endpoints")
    tls_key: str = _clients("", "its private key (PEM)")
    log_requests: bool = _logs(False, "write prompts and answers to the log")
    trace_share: float = setting(
        0.0,
        "share of requests that OpenTelemetry traces; where to: OTEL_EXPORTER_OTLP_ENDPOINT",
        group="traces",
        least=0,
        most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair(self.tls_cert, self.tls_key, "")
        for each in split_list(self.trusted_proxies):
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise SettingsError(
                    f"trusted_proxies: {error}; expected addresses or networks such as 10.0.0.7,10.1.0.0/16"
                ) from None


def split_list(text: str) -> list[str]:
    """Return the entries of a list that commas separate."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def check_pair(cert: str, key: str, prefix: str) -> None:
    """Raises SettingsError if one of certificate and key is given without the other."""
    if bool(cert) != bool(key):
        given, missing = ("tls_cert", "tls_key") if cert else ("tls_key", "tls_cert")
        raise SettingsError(f"{prefix}{given} is given without {prefix}{missing}: TLS needs both")


def check_service_listener(access: ServiceAccess, host: str) -> None:
    """Raises SettingsError if a service would answer other machines without asking who they are."""
    asked = access.service_token or access.service_token_file or (access.tls_cert and access.tls_ca)
    _check_listener(
        access, host, bool(asked), "--service-token-file FILE, or --tls-cert, --tls-key and --tls-ca for mutual TLS"
    )


def check_client_listener(access: ClientAccess, host: str) -> None:
    """Raises SettingsError if the client endpoints would answer other machines without asking who they are."""
    asked = access.api_key or access.api_keys_file
    _check_listener(access, host, bool(asked), "--api-keys-file FILE (`specahead key` makes its lines)")


def _check_listener(access: ProcessSettings, host: str, asked: bool, remedy: str) -> None:
    if not (asked or access.insecure or is_loopback(host)):
        raise SettingsError(
            f"host is {host!r}, which other machines can reach, and nobody is asked who they are: give {remedy}; or "
            "--insecure if the network keeps strangers out"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. A name counts as reachable from elsewhere, except localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_secret(path: str, name: str) -> str:
    """The text of a file without the white space around it; "" if path is "". Raises SettingsError."""
    if not path:
        return ""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not secret.isascii() or not secret.isprintable() or not secret or " " in secret:
        raise SettingsError(f"{name} {path}: expected one word of printable ASCII characters")
    return secret
