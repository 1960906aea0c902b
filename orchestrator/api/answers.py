"""The common parts of answers: errors, usage, how speculation went, and choices as the sum of their pieces."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import reduce
from itertools import chain, pairwise
from typing import Any

from orchestrator.sessions.generation import Chunk
from orchestrator.sessions.ledger import SpeculationTotals
from specahead.wire.errors import ServiceError
from specahead.wire.messages import FinishReason

Event = dict[str, Any]


def error_body(error: ServiceError) -> Event:
    """Return an error in OpenAI's form."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


class Totals:
    """The tokens and rounds of all choices of a request, known once each has ended."""

    def __init__(self, choices: int) -> None:
        """choices: how many there are of each prompt."""
        self._choices = choices
        self._last: dict[int, Chunk] = {}

    def add(self, chunk: Chunk) -> None:
        """Take note of a chunk."""
        if chunk.finish_reason is not FinishReason.NONE:
            self._last[chunk.choice] = chunk

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of tokens: of prompts, of prompts with KV from before, and generated."""
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
        """Return the sums over rounds by our names and by vLLM's."""
        totals = reduce(SpeculationTotals.plus, (chunk.totals for chunk in self._last.values()))
        return {"speculation": totals.summary(), "metrics": {"speculative_decoding": _as_vllm_names(totals)}}


def _as_vllm_names(totals: SpeculationTotals) -> Event:
    """Return the sums over rounds as vLLM reports them: entry j of the histogram counts rounds that accepted j."""
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
    """An answer in one protocol, built from chunks."""

    final_event = "data: [DONE]\n\n"
    """The text that ends a stream."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals

    @abstractmethod
    def opening(self) -> list[Event]:
        """Return the first events of a stream."""

    @abstractmethod
    def add(self, chunk: Chunk) -> list[Event]:
        """Add a chunk, and return its events."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """Return the events after the end of all choices."""

    @abstractmethod
    def whole(self) -> Event:
        """Return the answer in one piece, after `opening` and all chunks."""

    def speculation(self) -> Event:
        """Return how speculation went: the last event of a stream has it, a whole answer only for those who ask."""
        return self._totals.speculation()

    def failure(self, error: ServiceError) -> Event:
        """Return the event of an error."""
        return error_body(error)


class ChoicesAnswer(Answer):
    """The answer to a completion or a chat: choices, each of which is the sum of its pieces."""

    whole_object: str
    """OpenAI's name of the whole answer."""
    piece_object: str
    """OpenAI's name of an event of a stream."""

    def __init__(self, name: str, model: str, request: Any, choices: int) -> None:
        """choices: of each prompt, at least one. request: a CompletionRequest or a ChatRequest."""
        super().__init__(Totals(choices))
        self._request = request
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._pieces: dict[int, list[Event]] = {}  # of each choice

    def _whole_choice(self, joined_pieces: Event) -> Event:
        """Return a choice of the whole answer. joined_pieces: the sum of its pieces."""
        return joined_pieces

    def _piece(self, choice: int, content: Event, reason: str | None = None, logprobs: Event | None = None) -> Event:
        """Add a piece to a choice and return its event."""
        piece = {"index": choice, **content, "logprobs": logprobs, "finish_reason": reason}
        self._pieces.setdefault(choice, []).append(piece)
        return self._head | {"object": self.piece_object, "choices": [piece]}

    def _token_ids(self, tokens: list[int]) -> Event:
        """Return the field of a piece's tokens; empty unless the request asks for it."""
        return {"token_ids": tokens} if self._request.return_token_ids else {}

    def closing(self) -> list[Event]:
        if not self._request.wants_usage:
            return []
        last = self._head | {"object": self.piece_object, "choices": [], "usage": self._totals.usage()}
        return [last | self.speculation()]

    def whole(self) -> Event:
        choices = [self._whole_choice(joined(pieces)) for _, pieces in sorted(self._pieces.items())]
        return self._head | {"object": self.whole_object, "choices": choices, "usage": self._totals.usage()}


def joined(parts: Iterable[Any]) -> Any:
    """Return the sum of values that arrived one by one: texts and lists end to end, objects by key, else the last."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if isinstance(given[0], str):
        return "".join(given)
    if isinstance(given[0], list):
        return list(chain.from_iterable(given))
    if isinstance(given[0], dict):
        return {key: joined(part.get(key) for part in given) for key in dict.fromkeys(chain.from_iterable(given))}
    return given[-1]
