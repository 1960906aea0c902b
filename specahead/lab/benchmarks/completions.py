"""Requests of benchmarks to any server with OpenAI's completions API: prompts of token ids, answers that stream."""

import argparse
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.plotting import make_figure, put_legend, save_figure

_WARM_UP = (1, 4, 16)  # requests at once
_WARM_UP_PROMPT, _WARM_UP_TOKENS = 3000, 24
_LEAST_TOKEN = 10  # ids below are often special tokens


class Client:
    """Completions of one server. Its methods raise ValueError for a refused request, OSError without an answer."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._url, self._timeout = flags.url.rstrip("/"), flags.timeout
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
        self._more: dict[str, Any] = {"exactness": flags.exactness} if flags.exactness else {}
        self._model = flags.model or self._first_model()
        self.told_ids = True
        """Whether every answer came with its token ids; else other tokens take its place in the next prompt."""

    def _first_model(self) -> str:
        with self._open("/v1/models", None) as response:
            return str(json.load(response)["data"][0]["id"])

    def generate(self, tokens: Sequence[int], count: int, temperature: float = 0.0) -> tuple[list[int], float]:
        """Generate `count` tokens behind a prompt; return them, and when the first came, by time.perf_counter."""
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": count,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        answer: list[int] = []
        first, generated = 0.0, 0
        with self._open("/v1/completions", json.dumps(body | self._more).encode()) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ValueError(f"the server ended a request: {event['error']}")
                generated = (event.get("usage") or {}).get("completion_tokens") or generated
                for choice in event.get("choices", []):
                    if choice.get("token_ids") or choice.get("text"):
                        first = first or time.perf_counter()
                    answer += choice.get("token_ids") or []
        if not first:
            raise ValueError("the server ended a request without a token")
        if not answer:
            self.told_ids = False
            answer = list(range(_LEAST_TOKEN, _LEAST_TOKEN + (generated or count)))
        return answer, first

    def _open(self, path: str, body: bytes | None) -> http.client.HTTPResponse:
        request = urllib.request.Request(self._url + path, body, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self._url}{path}: {error.code}: {error.read().decode()[:500]}") from None
        except OSError as error:
            raise OSError(f"{self._url} does not answer: {getattr(error, 'reason', error)}") from None


def warm_up(client: Client, source: "TokenSource", seed: int, temperature: float = 0.0) -> None:
    """Let the server compile and capture what it does so at its first requests."""
    tokens = source.draw(np.random.default_rng(seed + 1), _WARM_UP_PROMPT)
    for count in _WARM_UP:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda start: client.generate(tokens[start:], _WARM_UP_TOKENS, temperature), range(count)))


class TokenSource:
    """Where the tokens of prompts come from: texts, or any token ids."""

    def __init__(self, flags: argparse.Namespace) -> None:
        """Raises ValueError where texts or their tokenizer are missing, OSError for files that cannot be read."""
        self._vocabulary, self._of_texts = flags.vocabulary, list[int]()
        if bool(flags.text) != bool(flags.tokenizer):
            raise ValueError("--text and --tokenizer go together: the server is sent the texts' token ids")
        if flags.text:
            text = "\n".join(Path(file).read_text(encoding="utf-8") for file in flags.text)
            self._of_texts = load_tokenizer(flags.tokenizer).encode(text, add_special_tokens=False)

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Return `count` tokens of the texts that follow each other from some place on, or any ids.

        Raises ValueError for texts that are shorter.
        """
        if not self._of_texts:
            return random.integers(_LEAST_TOKEN, self._vocabulary, count).tolist()
        if count > len(self._of_texts):
            raise ValueError(f"--text has {len(self._of_texts)} tokens, and a prompt needs {count}: name longer files")
        start = int(random.integers(0, len(self._of_texts) - count + 1))
        return self._of_texts[start : start + count]

    def as_prompt(self, answer: Sequence[int]) -> list[int]:
        """Return an answer as later prompts have it: ids that are not drawn often end a random model's texts."""
        return list(answer) if self._of_texts else [token % self._vocabulary for token in answer]


def plot_latency(
    load: Sequence[float], rows: Sequence[object], lines: Mapping[str, str], what: str, path: Path
) -> None:
    """Plot seconds over a load. lines: by label, the name of a figure of the rows. what: names the load."""
    figure, (axis,) = make_figure("How long answers take as the load grows: lower is better")
    for label, name in lines.items():
        axis.plot(load, [getattr(row, name) for row in rows], marker="o", label=label)
    axis.set(xlabel=what, ylabel="seconds", ylim=(0, None))
    put_legend(axis)
    save_figure(figure, path)
