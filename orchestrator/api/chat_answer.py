"""The answer to a chat, whole or in pieces."""

from typing import Any

from orchestrator.api.answers import ChoicesAnswer, Event, joined
from orchestrator.api.logprobs import chat_logprobs, naming
from orchestrator.requests.chat_request import ChatRequest
from orchestrator.sessions.generation import Chunk
from orchestrator.text.json_calls import Delta
from orchestrator.text.replies import ReplyParser


class ChatAnswer(ChoicesAnswer):
    """The answer to a chat."""

    whole_object, piece_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, name: str, model: str, request: ChatRequest, prompt: list[int], parsers: list[ReplyParser], tokenizer: Any
    ) -> None:
        """prompt: its tokens. parsers: of each choice's text."""
        super().__init__(f"chatcmpl-{name}", model, request, len(parsers))
        self._decode, self._tokenizer, self._parsers = naming(request, tokenizer.decode), tokenizer, parsers
        self._prompt = {"prompt_token_ids": prompt} if request.return_token_ids else {}
        self._calls = [0] * len(parsers)  # of each choice so far

    def opening(self) -> list[Event]:
        delta = {"role": "assistant", "content": ""}
        pieces = [self._piece(i, {"delta": delta}) for i in range(len(self._parsers))]
        return [pieces[0] | self._prompt, *pieces[1:]]

    def add(self, chunk: Chunk) -> list[Event]:
        self._totals.add(chunk)
        choice, reason = chunk.choice, chunk.reason
        deltas = self._parsers[choice].feed(chunk.text, reason is not None, reason == "length")
        parts = [part for delta in deltas if (part := self._part(choice, delta))]
        # The fields of tokens stand in the first piece, whatever part of the text each token has.
        logprobs, ids = self._logprobs(chunk), self._token_ids(chunk.tokens)
        if (logprobs is not None or ids) and not parts:
            parts = [{"content": ""}]
        events = []
        for part in parts:
            events.append(self._piece(choice, {"delta": part} | ids, logprobs=logprobs))
            logprobs, ids = None, {}
        if reason is None:
            return events
        reason = "tool_calls" if self._calls[choice] and reason == "stop" else reason
        return [*events, self._piece(choice, {"delta": {}}, reason)]

    def _logprobs(self, chunk: Chunk) -> Event | None:
        """Return the log probabilities of a chunk's tokens, None if there are none or nobody asked."""
        entries = chat_logprobs(chunk, self._decode, self._tokenizer) if self._request.logprobs else []
        return {"content": entries, "refusal": None} if entries else None

    def _part(self, choice: int, delta: Delta) -> Event:
        """Return a delta in OpenAI's form; empty for calls after the first if the request wants one alone."""
        if delta.content:
            return {"content": delta.content}
        if delta.reasoning:
            return {"reasoning_content": delta.reasoning}
        self._calls[choice] += delta.call is not None
        if self._request.parallel_tool_calls is False and self._calls[choice] > 1:
            return {}
        part: Event = {"function": {"arguments": delta.arguments}}
        if (call := delta.call) is not None:
            function = {"name": call.name, "arguments": call.arguments}
            part = {"id": call.id, "type": "function", "function": function}
        return {"tool_calls": [{"index": self._calls[choice] - 1} | part]}

    def _whole_choice(self, joined_pieces: Event) -> Event:
        """Return a choice of the whole answer; its content is null beside calls if there is none."""
        delta, calls = joined_pieces.pop("delta"), dict[int, list[Event]]()
        for part in delta.pop("tool_calls", []):
            calls.setdefault(part.pop("index"), []).append(part)
        message: dict[str, Any] = delta | {"content": delta["content"] or (None if calls else "")}
        if calls:
            message["tool_calls"] = [joined(parts) for parts in calls.values()]
        return joined_pieces | {"message": message}

    def whole(self) -> Event:
        return super().whole() | self._prompt
