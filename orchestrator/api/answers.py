"""What the answers of all protocols have alike: how a stream is told, what a request took, what is said of errors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import reduce
from itertools import pairwise
from typing import Any

from orchestrator.sessions.generation import Chunk
from orchestrator.sessions.ledger import SpeculationTotals
from specahead.wire.errors import ServiceError
from specahead.wire.messages import FinishReason

Event = dict[str, Any]


def error_body(error: ServiceError) -> Event:
    """Return OpenAI's account of an error."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def error_headers(error: ServiceError) -> dict[str, str]:
    """Return what HTTP says of an error beside its body."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    return headers | ({"WWW-Authenticate": "Bearer"} if error.http_code == 401 else {})


class Totals:
    """What all choices of a request took, known once each has ended. choices: how many there are of each prompt."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._last: dict[int, Chunk] = {}

    def add(self, chunk: Chunk) -> None:
        """Take note of a chunk."""
        if chunk.finish_reason is not FinishReason.NONE:
            self._last[chunk.choice] = chunk

    def counts(self) -> tuple[int, int, int]:
        """Return the tokens of the prompts, those of them whose KV was there already, and the tokens generated."""
        prompts = [chunk for choice, chunk in self._last.items() if choice % self._choices == 0]
        generated = sum(chunk.completion_tokens for chunk in self._last.values())
        return sum(c.prompt_tokens for c in prompts), sum(c.cached_tokens for c in prompts), generated

    def usage(self) -> Event:
        """Return OpenAI's usage."""
        prompt, cached, generated = self.counts()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def speculation(self) -> Event:
        """Return how the rounds went, by our names and by vLLM's."""
        totals = reduce(SpeculationTotals.plus, (chunk.totals for chunk in self._last.values()))
        return {"speculation": totals.summary(), "metrics": {"speculative_decoding": _as_vllm_names(totals)}}


def _as_vllm_names(totals: SpeculationTotals) -> Event:
    """Return a request's speculation as vLLM reports it. The histogram says how many rounds accepted j tokens."""
    reached = [totals.rounds, *totals.accepted_per_position, 0]
    return {
        "mean_acceptance_length": 1 + totals.accepted / totals.rounds if totals.rounds else 0.0,
        "draft_acceptance_rate": totals.accepted / totals.drafted if totals.drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in pairwise(reached)],
        "num_spec_steps": totals.rounds,
        "num_accepted_draft_tokens": totals.accepted,
        "num_draft_tokens": totals.drafted,
        "num_spec_tokens": len(totals.accepted_per_position),
    }


class Answer(ABC):
    """An answer in the making, as its protocol words it. final_event: the text that ends its stream."""

    final_event = "data: [DONE]\n\n"

    def __init__(self, totals: Totals) -> None:
        self._totals = totals

    @abstractmethod
    def opening(self) -> list[Event]:
        """Return what a stream begins with."""

    @abstractmethod
    def add(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return what a stream says of it."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """Return what a stream says when all choices have ended."""

    @abstractmethod
    def whole(self) -> Event:
        """Return the answer in one piece."""

    def failure(self, error: ServiceError) -> Event:
        """Return what a stream says of an error."""
        return error_body(error)


def mark(chunk: Chunk) -> Event:
    """Return whether a chunk's tokens were drafted and accepted, for requests that ask for it."""
    return {} if chunk.accepted is None else {"accepted": chunk.accepted}


def choice(index: int, content: Mapping[str, Any], reason: str | None, logprobs: Event | None = None) -> Event:
    """Return a choice of a completion or of a chat."""
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
