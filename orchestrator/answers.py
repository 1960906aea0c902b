"""The JSON of an answer, whole or in pieces, to a completion or to a chat."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import Any

from orchestrator.generation import Chunk
from orchestrator.ledger import SpeculationTotals
from orchestrator.logprobs import CompletionLogprobs, Decode, chat_logprobs
from orchestrator.replies import CalledTool, Delta, ReplyParser
from wire.errors import ServiceError
from wire.messages import FinishReason

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


class CompletionAnswer(Answer):
    """The answer to a completion. echoes: the texts that the choices begin with.

    logprobs: of each choice, if they are asked for. only_echoes: leave out what is generated.
    """

    def __init__(
        self,
        name: str,
        model: str,
        echoes: list[str],
        totals: Totals,
        usage: bool,
        logprobs: list[CompletionLogprobs] | None = None,
        only_echoes: bool = False,
    ) -> None:
        super().__init__(totals)
        self._logprobs, self._only_echoes = logprobs, only_echoes
        self._told: list[Event | None] = [None] * len(echoes)
        self._head = {"id": f"cmpl-{name}", "object": "text_completion", "created": int(time.time()), "model": model}
        self._texts = [""] * len(echoes)
        self._reasons: list[str | None] = [None] * len(echoes)
        self._echoes = echoes
        self._usage = usage

    def opening(self) -> list[Event]:
        """Return what a stream begins with."""
        return [self._piece(_choice(i, {"text": echo}, None)) for i, echo in enumerate(self._echoes) if echo]

    def add(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return what a stream says of it."""
        if self._only_echoes:
            chunk = replace(chunk, text="", tokens=[], completion_tokens=0)
        self._totals.add(chunk)
        self._texts[chunk.choice] += chunk.text
        self._reasons[chunk.choice] = reason = chunk.reason
        told = self._tell_logprobs(chunk)
        if not (chunk.text or reason or told):
            return []
        return [self._piece(_choice(chunk.choice, {"text": chunk.text}, reason, told))]

    def _tell_logprobs(self, chunk: Chunk) -> Event | None:
        """Return what is said of a chunk's log probabilities, and keep it for the whole."""
        if self._logprobs is None:
            return None
        told, before = self._logprobs[chunk.choice].take(chunk), self._told[chunk.choice]
        self._told[chunk.choice] = told if before is None else {name: before[name] + told[name] for name in told}
        return told

    def closing(self) -> list[Event]:
        """Return what a stream says when all choices have ended."""
        return [self._head | {"choices": [], "usage": self._totals.usage()} | self._totals.speculation()] * self._usage

    def whole(self) -> Event:
        """Return the answer in one piece."""
        texts = [echo + text for echo, text in zip(self._echoes, self._texts, strict=True)]
        choices = [_choice(i, {"text": text}, self._reasons[i], self._told[i]) for i, text in enumerate(texts)]
        return self._head | {"choices": choices, "usage": self._totals.usage()} | self._totals.speculation()

    def _piece(self, choice: Event) -> Event:
        return self._head | {"choices": [choice]}


@dataclass
class _Message:
    """A chat's choice in the making. parser: None if all text is content. logprobs: None if they are not asked for."""

    parser: ReplyParser | None
    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)
    reason: str | None = None
    logprobs: Event | None = None


class ChatAnswer(Answer):
    """The answer to a chat. parsers: of each choice's text. one_call: whether calls after the first are left out.

    decode: gives the text of tokens, where log probabilities are asked for.
    """

    def __init__(
        self,
        name: str,
        model: str,
        parsers: list[ReplyParser | None],
        one_call: bool,
        totals: Totals,
        usage: bool,
        decode: Decode | None = None,
    ) -> None:
        super().__init__(totals)
        self._decode = decode
        self._head = {"id": f"chatcmpl-{name}", "created": int(time.time()), "model": model}
        self._messages = [_Message(parser) for parser in parsers]
        self._one_call = one_call
        self._usage = usage

    def opening(self) -> list[Event]:
        """Return what a stream begins with."""
        return [self._piece(i, {"role": "assistant", "content": ""}) for i in range(len(self._messages))]

    def add(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return what a stream says of it."""
        self._totals.add(chunk)
        message, reason = self._messages[chunk.choice], chunk.reason
        deltas = [Delta(chunk.text)] if chunk.text else []
        if message.parser is not None:
            deltas = message.parser.feed(chunk.text, reason is not None)
        parts = [part for delta in deltas if (part := self._take(message, delta))]
        told = self._tell_logprobs(message, chunk)
        if told is not None and not parts:
            parts = [{"content": ""}]
        # Log probabilities stand in the first piece, whatever part of the text each token is of.
        said = [self._piece(chunk.choice, part, None, None if i else told) for i, part in enumerate(parts)]
        if reason is None:
            return said
        message.reason = "tool_calls" if message.calls and reason == "stop" else reason
        return [*said, self._piece(chunk.choice, {}, message.reason)]

    def _tell_logprobs(self, message: _Message, chunk: Chunk) -> Event | None:
        """Return what is said of a chunk's log probabilities, and add it to the message's."""
        if self._decode is None:
            return None
        told = chat_logprobs(chunk, self._decode)
        message.logprobs = {"content": [*(message.logprobs or {"content": []})["content"], *told], "refusal": None}
        return {"content": told, "refusal": None} if told else None

    def _take(self, message: _Message, delta: Delta) -> Event:
        """Add a delta to a message, and return it as a stream tells it; empty if it is left out."""
        if delta.call is not None:
            message.calls.append(delta.call)
        elif delta.arguments:
            last = message.calls[-1]
            message.calls[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            message.content += delta.content
            message.reasoning += delta.reasoning
            return {"content": delta.content} if delta.content else {"reasoning_content": delta.reasoning}
        if self._one_call and len(message.calls) > 1:
            return {}
        told = _call(delta.call) if delta.call else {"function": {"arguments": delta.arguments}}
        return {"tool_calls": [{"index": len(message.calls) - 1} | told]}

    def closing(self) -> list[Event]:
        """Return what a stream says when all choices have ended."""
        last = self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._totals.usage()}
        return [last | self._totals.speculation()] * self._usage

    def whole(self) -> Event:
        """Return the answer in one piece."""
        calls = 1 if self._one_call else None
        choices = [
            _choice(i, {"message": _message(m, calls)}, m.reason, m.logprobs) for i, m in enumerate(self._messages)
        ]
        body = self._head | {"object": "chat.completion", "choices": choices, "usage": self._totals.usage()}
        return body | self._totals.speculation()

    def _piece(self, index: int, delta: Event, reason: str | None = None, logprobs: Event | None = None) -> Event:
        choice = _choice(index, {"delta": delta}, reason, logprobs)
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}


def _message(message: _Message, most_calls: int | None) -> Event:
    """Return a choice's message; content is null beside calls if there is none."""
    body: Event = {"role": "assistant", "content": message.content if message.content or not message.calls else None}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [_call(call) for call in message.calls[:most_calls]]
    return body


def _call(call: CalledTool) -> Event:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _choice(index: int, content: Mapping[str, Any], reason: str | None, logprobs: Event | None = None) -> Event:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
