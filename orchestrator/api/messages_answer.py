"""The answer to a request of Anthropic's Messages: blocks, or the events that build them; and errors in its form."""

from typing import Any

from pydantic_core import from_json

from orchestrator.api.answers import Answer, Event, Totals
from orchestrator.requests.messages_request import MessagesRequest
from orchestrator.sessions.generation import Chunk
from orchestrator.text.json_calls import Delta
from orchestrator.text.replies import ReplyParser
from specahead.wire.errors import ServiceError

PATH = "/v1/messages"
# Anthropic's names of errors by their HTTP codes.
_KINDS = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}


def messages_error(error: ServiceError, http_code: int) -> Event:
    """Return an error in Anthropic's form."""
    kind = _KINDS.get(http_code, "invalid_request_error" if http_code < 500 else "api_error")
    # Anthropic's words, by which agents know that they have to shorten the conversation.
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{too_long}{error}"}}


class MessagesAnswer(Answer):
    """The answer to a request for a message."""

    final_event = ""

    def __init__(
        self, name: str, model: str, request: MessagesRequest, prompt_tokens: int, parser: ReplyParser, parallel: bool
    ) -> None:
        """prompt_tokens: how many the prompt has. parser: of the text. parallel: whether there may be several calls."""
        super().__init__(Totals(1))
        self._head = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model}
        self._request, self._prompt_tokens, self._parser, self._parallel = request, prompt_tokens, parser, parallel
        self._blocks: list[Event] = []
        self._arguments: list[str] = []  # of each block's call, as JSON
        self._is_open = False  # the last block
        self._calls = 0
        self._stop: Event = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> list[Event]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self._head | {"content": [], "usage": usage} | self._stop}]

    def add(self, chunk: Chunk) -> list[Event]:
        self._totals.add(chunk)
        deltas = self._parser.feed(chunk.text, chunk.reason is not None, chunk.reason == "length")
        events = [event for delta in deltas for event in self._take(delta)]
        if chunk.reason is None:
            return events
        self._stop = {"stop_reason": self._stop_reason(chunk), "stop_sequence": chunk.stop or None}
        return [*events, *self._close()]

    def _stop_reason(self, chunk: Chunk) -> str:
        if chunk.reason == "length":
            whole = chunk.completion_tokens >= self._request.max_tokens
            return "max_tokens" if whole else "model_context_window_exceeded"
        return "stop_sequence" if chunk.stop else "tool_use" if self._calls else "end_turn"

    def closing(self) -> list[Event]:
        last = {"type": "message_delta", "delta": self._stop, "usage": self._usage()} | self.speculation()
        return [last, {"type": "message_stop"}]

    def whole(self) -> Event:
        for block, arguments in zip(self._blocks, self._arguments, strict=True):
            if block["type"] == "tool_use":  # as much as there is of one that was cut off
                block["input"] = from_json(arguments or "{}", allow_partial="trailing-strings")
        return self._head | {"content": self._blocks, "usage": self._usage()} | self._stop

    def failure(self, error: ServiceError) -> Event:
        return messages_error(error, error.http_code)

    def _usage(self) -> Event:
        prompt, cached, generated = self._totals.counts()
        return {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": generated,
        }

    def _take(self, delta: Delta) -> list[Event]:
        """Add a delta to the blocks, and return its events."""
        self._calls += delta.call is not None
        if (delta.call or delta.arguments) and self._calls > 1 and not self._parallel:
            return []
        events = []
        if (call := delta.call) is not None:
            events = self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if arguments := delta.arguments or (call.arguments if call is not None else ""):
            self._arguments[-1] += arguments
            return [*events, self._delta({"type": "input_json_delta", "partial_json": arguments})]
        if call is not None:
            return events
        kind, text = ("text", delta.content) if delta.content else ("thinking", delta.reasoning)
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            events = self._begin({"type": kind, kind: ""} | signed)
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: Event) -> list[Event]:
        """Open a block after the end of the one before, and return the events."""
        closed = self._close()
        self._blocks.append(block)
        self._arguments.append("")
        self._is_open = True
        return [*closed, self._event("content_block_start", content_block=dict(block))]

    def _close(self) -> list[Event]:
        """End the open block, if there is one, and return the events."""
        was_open, self._is_open = self._is_open, False
        return [self._event("content_block_stop")] if was_open else []

    def _delta(self, delta: Event) -> Event:
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **values: Any) -> Event:
        """Return an event of the last block."""
        return {"type": kind, "index": len(self._blocks) - 1, **values}
