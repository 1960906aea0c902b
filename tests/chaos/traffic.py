"""Steady mixed traffic that checks each answer, whatever happens to the services meanwhile."""

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from protos import inference_pb2_grpc
from tests.client import APPROXIMATE, make_request

ANSWER_SECONDS = 240  # after this time an answer counts as lost
# Errors that a client may get when services come and go. All others are violations.
ALLOWED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
ALLOWED_HTTP = {429, 503}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Case:
    """A prompt, and the tokens that greedy decoding gives."""

    prompt: list[int]
    expected: list[int]


class Traffic:
    """Clients in threads, each with one request after the other.

    outcomes: counts of requests by kind and end. violations: wrong answers.
    """

    def __init__(self, cases: list[Case], endpoints: Callable[[], tuple[str, str]], clients: int, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.violations: list[str] = []
        self._cases, self._endpoints = cases, endpoints
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed + i,), daemon=True) for i in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the requests in flight, and send no more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS + 30)
            if thread.is_alive():
                self.violations.append("a client waits for ever")

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        kinds = [self.exact] * 5 + [self.approximate, self.sampled, self.abort, self.read_slowly, self.call_tools]
        while not self._stopping.is_set():
            kind = rng.choice(kinds)
            try:
                outcome = kind(rng)
            except grpc.RpcError as error:
                outcome = self._judge(error.code() in ALLOWED, f"{error.code().name}", error.details())
            except urllib.error.HTTPError as error:
                outcome = self._judge(error.code in ALLOWED_HTTP, f"HTTP {error.code}", error.read()[:300])
            except OSError as error:  # the gateway is gone
                outcome = type(error).__name__
            except Exception as error:
                outcome = self._judge(False, type(error).__name__, error)
            self.outcomes[f"{kind.__name__}: {outcome}"] += 1
            if outcome != "finished":
                time.sleep(1)

    def _judge(self, is_allowed: bool, outcome: str, details: Any) -> str:
        if not is_allowed:
            self.violations.append(f"{outcome}: {details}")
        return outcome

    def _stream(self, rng: random.Random, prompt: list[int], most: int, **fields: Any) -> list[int]:
        """Return at most `most` tokens of a request. Raises RpcError whose `tokens` are those that came before it."""
        tokens: list[int] = []
        with grpc.insecure_channel(self._endpoints()[0]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = make_request(prompt, ignore_eos=True, **fields)
            try:
                for response in stub.Generate(request, timeout=ANSWER_SECONDS):
                    tokens += response.token_ids
                    if len(tokens) >= most:
                        break
            except grpc.RpcError as error:
                error.tokens = tokens
                raise
        return tokens

    def exact(self, rng: random.Random) -> str:
        """Check that greedy tokens are the expected ones, each once and in order, as far as they come."""
        case = rng.choice(self._cases)
        count = rng.randint(8, len(case.expected))
        try:
            tokens = self._stream(rng, case.prompt, count + 1, temperature=0, max_tokens=count)
        except grpc.RpcError as error:
            self._compare(error.tokens, case.expected[: len(error.tokens)])
            raise
        return self._compare(tokens, case.expected[:count])

    def _compare(self, tokens: list[int], expected: list[int]) -> str:
        if tokens == expected:
            return "finished"
        same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(tokens))
        return self._judge(False, "wrong tokens", f"{len(tokens)} of {len(expected)}, alike up to {same}")

    def approximate(self, rng: random.Random) -> str:
        case, count = rng.choice(self._cases), rng.randint(8, 60)
        fields = {"temperature": 0, "max_tokens": count, "exactness": APPROXIMATE}
        return self._count(self._stream(rng, case.prompt, count + 1, **fields), count)

    def sampled(self, rng: random.Random) -> str:
        case, count = rng.choice(self._cases), rng.randint(8, 60)
        return self._count(self._stream(rng, case.prompt, count + 1, temperature=0.8, max_tokens=count), count)

    def _count(self, tokens: list[int], count: int) -> str:
        return "finished" if len(tokens) == count else self._judge(False, "wrong number", f"{len(tokens)}, not {count}")

    def abort(self, rng: random.Random) -> str:
        """Leave a stream in the middle."""
        self._stream(rng, rng.choice(self._cases).prompt, rng.randint(1, 20), temperature=0, max_tokens=400)
        return "finished"

    def read_slowly(self, rng: random.Random) -> str:
        body = {"prompt": rng.choice(self._cases).prompt, "max_tokens": 60, "stream": True, "temperature": 0}
        with self._post("/v1/completions", body) as response:
            for line in response:
                time.sleep(0.05)
                if b'"error"' in line:
                    code = json.loads(line.partition(b":")[2])["error"].get("code")
                    return self._judge("unavailable" in str(code), f"error in the stream: {code}", line)
        return "finished"

    def call_tools(self, rng: random.Random) -> str:
        body = {"messages": [{"role": "user", "content": "Where is the sea?"}], "max_tokens": 20, "temperature": 0}
        body |= {"tools": [TOOL]} if rng.random() < 0.5 else {}
        with self._post("/v1/chat/completions", body) as response:
            json.load(response)
        return "finished"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._endpoints()[1] + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=ANSWER_SECONDS)
