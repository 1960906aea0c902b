"""Certificates for tests, made where they are used: an authority, and what it signed, mostly for 127.0.0.1."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme

HERE = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Files:
    """PEM files of one certificate."""

    cert: str
    key: str
    ca: str

    def flags(self) -> list[str]:
        """Flags of `specahead health` for mutual TLS."""
        return ["--tls-cert", self.cert, "--tls-key", self.key, "--tls-ca", self.ca]

    def keys(self, *names: str) -> str:
        """These of its files, as the settings --tls and --service-tls take them."""
        return json.dumps({name: getattr(self, name) for name in names})


def make_certificate(
    folder: Path, name: str, authority: trustme.CA, expired: bool = False, hosts: Sequence[str] = HERE
) -> Files:
    """Sign a certificate for hosts and write it with its key and its authority's."""
    dates = {"not_before": datetime(2020, 1, 1, tzinfo=UTC), "not_after": datetime(2020, 1, 2, tzinfo=UTC)}
    leaf = authority.issue_cert(*hosts, **(dates if expired else {}))
    files = Files(*(str(folder / f"{name}-{part}.pem") for part in ("cert", "key", "ca")))
    leaf.cert_chain_pems[0].write_to_path(files.cert)
    leaf.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files
