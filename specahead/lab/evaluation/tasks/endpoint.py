"""Answers of a server with OpenAI's completions or chat completions. Knows nothing of what is asked."""

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt."""

    text: str
    generated: int
    """Tokens of the answer; 0 if the server does not say."""
    speculation: dict[str, Any] | None
    """Sums over the answer's rounds, as our servers say them; None: not said."""


class Endpoint:
    """A server and the model that it is asked for. Raises ValueError for a refusal, OSError without an answer."""

    def __init__(self, url: str, model: str = "", api_key: str = "", chat: bool = False, timeout: float = 600) -> None:
        """url: without /v1. model: empty: the first one that the server lists. timeout: seconds of a request."""
        self._url, self._timeout = url.rstrip("/"), timeout
        if not self._url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        key = api_key or os.environ.get("SPECAHEAD_API_KEY", "")
        self._headers = {"Content-Type": "application/json", "X-Return-Speculation": "1"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._chat = chat
        self.model = model or str(self._open("/v1/models", None)["data"][0]["id"])

    def request(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """Return the request that asks for a prompt. fields: those of the protocol, the same for both of its forms."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        return {"model": self.model, **asked, **fields}

    def ask(self, request: dict[str, Any]) -> Answer:
        """Send a request and return its whole answer."""
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        body = self._open(path, json.dumps(request).encode())
        (choice,) = body["choices"]
        text = choice["message"].get("content") if self._chat else choice["text"]
        generated = (body.get("usage") or {}).get("completion_tokens") or 0
        return Answer(text or "", generated, body.get("speculation"))

    def _open(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self._url + path, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self._url}{path}: {error.code}: {error.read().decode()[:500]}") from None
        except (OSError, http.client.HTTPException) as error:
            raise OSError(f"{self._url}{path} does not answer: {getattr(error, 'reason', error)}") from None
