"""Answers of a server with OpenAI's completions or chat completions. Knows nothing of what is asked."""

import argparse
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LEAST_TOKEN = 10  # ids below are often special tokens
WARM_UP_PROMPT, WARM_UP_TOKENS = 3000, 24  # tokens of the first requests, at which servers compile what they run


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt."""

    text: str
    generated: int
    """Tokens of the answer; 0 if the server does not say."""
    speculation: dict[str, Any] | None
    """Sums over the answer's rounds, as our servers say them; None: not said."""


@dataclass(frozen=True)
class Streamed:
    """An answer that came piece by piece; times are by time.perf_counter."""

    tokens: list[int]
    opening: int
    """Tokens of the first piece."""
    sent: float
    """When the request was sent."""
    first: float
    """When the first piece came."""
    last: float
    """When the last piece came."""
    speculation: dict[str, Any] | None
    """As in Answer."""

    @property
    def tokens_a_second(self) -> float:
        """The speed of decoding, between the first piece and the last; 0 if there was one piece."""
        later = len(self.tokens) - self.opening
        return later / (self.last - self.first) if later else 0.0


class Endpoint:
    """A server and the model that it is asked for. Raises ValueError for a refusal, OSError without an answer."""

    def __init__(self, url: str, flags: argparse.Namespace, fields: dict[str, Any] | None = None) -> None:
        """url: without /v1. flags: with --model, --api-key and --timeout. fields: what all requests whose answers
        stream send beside their own fields.
        """
        self.url, self._timeout, self._fields = url.rstrip("/"), flags.timeout, fields or {}
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        key = flags.api_key or os.environ.get("SPECAHEAD_API_KEY", "")
        self._headers = {"Content-Type": "application/json", "X-Return-Speculation": "1"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.told_ids = True
        """Whether every answer that streamed came with its token ids; else other tokens stand for them."""
        self.model = flags.model or self._first_model()

    def _first_model(self) -> str:
        with self._open("/v1/models", None) as response:
            return str(json.load(response)["data"][0]["id"])

    def request(self, prompt: str, chat: bool = False, **fields: Any) -> dict[str, Any]:
        """Return the request that asks for a prompt, as a completion or as a chat. fields: those of the protocol, the
        same for both of its forms.
        """
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return {"model": self.model, **asked, **fields}

    def ask(self, request: dict[str, Any]) -> Answer:
        """Send a request and return its whole answer."""
        chat = "messages" in request
        path = "/v1/chat/completions" if chat else "/v1/completions"
        with self._open(path, json.dumps(request).encode()) as response:
            body = json.load(response)
        (choice,) = body["choices"]
        text = choice["message"].get("content") if chat else choice["text"]
        generated = (body.get("usage") or {}).get("completion_tokens") or 0
        return Answer(text or "", generated, body.get("speculation"))

    def generate(self, prompt: Sequence[int], count: int, temperature: float = 0.0, **fields: Any) -> Streamed:
        """Generate `count` tokens behind a prompt of token ids, and time them. fields: more ones of the protocol."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens: list[int] = []
        speculation: dict[str, Any] | None = None
        first = last = 0.0
        opening, generated, sent = 1, 0, time.perf_counter()
        with self._open("/v1/completions", json.dumps(body | self._fields | fields).encode()) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ValueError(f"the server ended a request: {event['error']}")
                generated = (event.get("usage") or {}).get("completion_tokens") or generated
                speculation = event.get("speculation", speculation)
                for choice in event.get("choices", []):
                    piece = choice.get("token_ids") or []
                    if piece or choice.get("text"):
                        last = time.perf_counter()
                        if not first:
                            first, opening = last, len(piece) or 1
                    tokens += piece
        if not first:
            raise ValueError("the server ended a request without a token")
        if not tokens:
            self.told_ids = False
            tokens = list(range(LEAST_TOKEN, LEAST_TOKEN + (generated or count)))
        return Streamed(tokens, opening, sent, first, last, speculation)

    def generate_at_once(
        self, prompts: Sequence[Sequence[int]], count: int, temperature: float = 0.0, **fields: Any
    ) -> list[Streamed]:
        """Generate behind several prompts at once, as `generate`."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, count, temperature, **fields), prompts))

    @contextmanager
    def _open(self, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        request = urllib.request.Request(self.url + path, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self.url}{path}: {error.code}: {error.read().decode()[:500]}") from None
        except (OSError, http.client.HTTPException) as error:
            raise OSError(f"{self.url}{path} does not answer: {getattr(error, 'reason', error)}") from None
