"""Calls to the HTTP endpoint of a running server."""

import argparse
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any

_PATIENCE = 60.0  # seconds without a byte; a stream says something every five


class Server:
    """A running server, by the flags --url, --api-key and --tls-ca. Its methods raise ValueError for a refusal, OSError
    if the server does not answer; the message says what to do."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.url = flags.url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url {flags.url!r}: expected http://HOST:PORT or https://HOST:PORT")
        self._key = flags.api_key or os.environ.get("SPECAHEAD_API_KEY", "")
        self._tls = ssl.create_default_context(cafile=flags.tls_ca) if self.url.startswith("https") else None

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        return json.loads(self.read(path))

    def read(self, path: str, refused: bool = False) -> str:
        """Return the text at a path; with `refused` also one that comes with an error's status."""
        try:
            with self._open(path, None) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            if refused:
                return error.read().decode()
            raise _refusal(error) from None

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the events of a stream as they come."""
        try:
            with self._open(path, json.dumps(body | {"stream": True}).encode()) as response:
                for line in response:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        event = json.loads(line.removeprefix(b"data: "))
                        if "error" in event:
                            raise ValueError(event["error"]["message"])
                        yield event
        except urllib.error.HTTPError as error:
            raise _refusal(error) from None

    def _open(self, path: str, body: bytes | None) -> http.client.HTTPResponse:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            return urllib.request.urlopen(request, timeout=_PATIENCE, context=self._tls)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) if isinstance(error, OSError) else "what answers speaks no HTTP"
            raise OSError(
                f"{self.url} does not answer: {reason}; check that a server runs there (specahead serve), "
                "the port, which is that of HTTP, and whether it speaks TLS (https://, --tls-ca)"
            ) from None


def _refusal(error: urllib.error.HTTPError) -> ValueError:
    """Return the server's reason for refusing a request."""
    try:
        said = json.loads(error.read())["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = error.reason
    remedy = " (--api-key or SPECAHEAD_API_KEY)" if error.code == 401 else ""
    return ValueError(f"{error.code}: {said}{remedy}")
