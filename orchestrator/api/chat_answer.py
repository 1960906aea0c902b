"""The answer to a chat, whole or in pieces."""

import time
from dataclasses import dataclass, field, replace

from orchestrator.api.answers import Answer, Event, Totals, choice, mark
from orchestrator.api.logprobs import Decode, chat_logprobs, naming
from orchestrator.requests.chat_request import ChatRequest
from orchestrator.sessions.generation import Chunk
from orchestrator.text.json_calls import CalledTool, Delta
from orchestrator.text.replies import ReplyParser


@dataclass
class _Message:
    """A chat's choice in the making. logprobs: None if they are not asked for."""

    parser: ReplyParser
    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)
    reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: Event | None = None


class ChatAnswer(Answer):
    """The answer to a chat. prompt: its tokens. parsers: of each choice's text. decode: gives the text of tokens."""

    def __init__(
        self, name: str, model: str, request: ChatRequest, prompt: list[int], parsers: list[ReplyParser], decode: Decode
    ) -> None:
        super().__init__(Totals(len(parsers)))
        self._request, self._decode = request, naming(request, decode)
        self._head = {"id": f"chatcmpl-{name}", "created": int(time.time()), "model": model}
        self._prompt = {"prompt_token_ids": prompt} if request.return_token_ids else {}
        self._messages = [_Message(parser) for parser in parsers]

    def opening(self) -> list[Event]:
        """Return what a stream begins with."""
        delta = {"role": "assistant", "content": ""}
        pieces = [self._piece(choice(i, {"delta": delta}, None)) for i in range(len(self._messages))]
        return [pieces[0] | self._prompt, *pieces[1:]]

    def add(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return what a stream says of it."""
        self._totals.add(chunk)
        message, reason = self._messages[chunk.choice], chunk.reason
        message.tokens += chunk.tokens
        deltas = message.parser.feed(chunk.text, reason is not None, reason == "length")
        parts = [part for delta in deltas if (part := self._take(message, delta))]
        # What is told of tokens stands in the first piece, whatever part of the text each token is of.
        told, ids = self._tell_logprobs(message, chunk), self._token_ids(chunk.tokens)
        if (told is not None or ids) and not parts:
            parts = [{"content": ""}]
        said = []
        for part in parts:
            said.append(self._piece(choice(chunk.choice, {"delta": part} | mark(chunk) | ids, None, told)))
            told, ids = None, {}
        if reason is None:
            return said
        message.reason = "tool_calls" if message.calls and reason == "stop" else reason
        return [*said, self._piece(choice(chunk.choice, {"delta": {}}, message.reason))]

    def _token_ids(self, tokens: list[int]) -> Event:
        """Return what is said of a choice's tokens, nothing unless it is asked for."""
        return {"token_ids": tokens} if self._request.return_token_ids else {}

    def _tell_logprobs(self, message: _Message, chunk: Chunk) -> Event | None:
        """Return what is said of a chunk's log probabilities, and add it to the message's."""
        if not self._request.logprobs:
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
        if not self._request.wants_usage:
            return []
        last = self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._totals.usage()}
        return [last | self._totals.speculation()]

    def whole(self) -> Event:
        """Return the answer in one piece."""
        calls = 1 if self._one_call else None
        choices = [
            choice(i, {"message": _message(m, calls)} | self._token_ids(m.tokens), m.reason, m.logprobs)
            for i, m in enumerate(self._messages)
        ]
        body = self._head | {"object": "chat.completion", "choices": choices, "usage": self._totals.usage()}
        return body | self._prompt | self._totals.speculation()

    @property
    def _one_call(self) -> bool:
        """Whether calls after the first are left out."""
        return self._request.parallel_tool_calls is False

    def _piece(self, choice: Event) -> Event:
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
