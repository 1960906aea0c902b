"""The answer to a request of OpenAI's Responses: items, or the events that build them."""

import secrets
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from orchestrator.api.answers import Answer, Event, Totals
from orchestrator.api.logprobs import chat_logprobs
from orchestrator.requests.responses_request import ResponsesRequest
from orchestrator.sessions.generation import Chunk
from orchestrator.text.json_calls import CalledTool, Delta
from orchestrator.text.replies import ReplyParser
from specahead.wire.errors import ServiceError

# The fields of a request that its response repeats.
_REPEATED = {
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature"),
    *("tool_choice", "tools", "top_logprobs", "top_p"),
}


class ResponsesAnswer(Answer):
    """The answer to a request for a response."""

    final_event = ""

    def __init__(
        self,
        name: str,
        model: str,
        request: ResponsesRequest,
        parser: ReplyParser,
        tokenizer: Any,
        store: Callable[[str, list[Event]], None] | None = None,
    ) -> None:
        """parser: of the text. store: takes its id and items at its end."""
        super().__init__(Totals(1))
        self._name, self._model, self._request, self._parser = name, model, request, parser
        self._created, self._store = int(time.time()), store
        self._items: list[Event] = []
        self._open: Event | None = None  # the item that text is added to
        self._status = "in_progress"
        self._event_count = self._calls = self._reasoning_tokens = 0
        self._held = 0  # tokens whose text has not been passed on
        self._tokenizer = tokenizer
        self._logprobs: list[Event] = []  # of tokens whose text has not been passed on

    def opening(self) -> list[Event]:
        return [self._event(kind, response=self.whole()) for kind in ("response.created", "response.in_progress")]

    def add(self, chunk: Chunk) -> list[Event]:
        self._totals.add(chunk)
        deltas = self._parser.feed(chunk.text, chunk.reason is not None, chunk.reason == "length")
        self._held += len(chunk.tokens)
        if deltas:
            self._reasoning_tokens += self._held if deltas[0].reasoning else 0
            self._held = 0
        if self._request.wanted_logprobs is not None:
            self._logprobs += chat_logprobs(chunk, self._tokenizer.decode, self._tokenizer)
            if deltas and not any(delta.content for delta in deltas):  # tokens of an item that is not a message
                self._logprobs = []
        events = [event for delta in deltas for event in self._take(delta)]
        if chunk.reason is not None:
            self._status = "incomplete" if chunk.reason == "length" else "completed"
            events += self._close()
            if self._store is not None:
                self._store(f"resp_{self._name}", self._items)
        return events

    def closing(self) -> list[Event]:
        return [self._event(f"response.{self._status}", response=self.whole() | self.speculation())]

    def failure(self, error: ServiceError) -> Event:
        return self._event("error", message=str(error), code=error.code, param=error.param)

    def whole(self) -> Event:
        """Return the response as it stands."""
        request, ended = self._request, self._status != "in_progress"
        body = request.model_dump(include=_REPEATED, exclude_unset=True)
        return {
            **dict.fromkeys(_REPEATED),
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}},
            **{name: value for name, value in body.items() if value is not None},
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": self._status,
            "output": deepcopy(self._items),  # which change after this
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "previous_response_id": request.previous_response_id,
            "store": self._store is not None,
            "text": self._text_options(),
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    def _text_options(self) -> Event:
        """Return the options of the text, the form that it must have among them."""
        given = self._request.text
        asked = given.model_dump(exclude_none=True, by_alias=True) if given is not None else {}
        return {"format": {"type": "text"}} | asked

    def _usage(self) -> Event:
        prompt, cached, generated = self._totals.counts()
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": prompt + generated,
        }

    def _take(self, delta: Delta) -> list[Event]:
        """Add a delta to the items, and return its events."""
        if delta.call is not None:
            self._calls += 1
        if (delta.call or delta.arguments) and self._calls > 1 and self._request.parallel_tool_calls is False:
            return []
        if delta.call is not None:
            return self._close() + self._begin_call(delta.call)
        if delta.arguments:
            return self._argue(delta.arguments)
        kind, text = ("message", delta.content) if delta.content else ("reasoning", delta.reasoning)
        events = []
        if self._open is None or self._open["type"] != kind:
            events = self._close() + self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        return [*events, self._part_event(f"response.{part['type']}.delta", delta=text, **self._take_logprobs(part))]

    def _take_logprobs(self, part: Event) -> Event:
        """Add the waiting log probabilities to a part, and return them as the field of its event.

        Events of visible text have the field, whether or not log probabilities are asked for.
        """
        if part["type"] != "output_text":
            return {}
        taken, self._logprobs = self._logprobs, []
        part["logprobs"] += taken
        return {"logprobs": taken}

    def _begin(self, kind: str) -> list[Event]:
        """Open a message or a reasoning item with one empty part of text, and return the events."""
        number = secrets.token_hex(12)
        if kind == "message":
            item: Event = {"id": f"msg_{number}", "type": kind, "role": "assistant"}
            part: Event = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{number}", "type": kind, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._open = item | {"status": "in_progress", "content": []}
        self._items.append(self._open)
        added = self._state_event("response.output_item.added", self._open)
        self._open["content"].append(part)
        return [added, self._part_event("response.content_part.added", part=dict(part))]

    def _close(self) -> list[Event]:
        """End the open item, if there is one, and return the events."""
        if self._open is None:
            return []
        if self._open["type"] == "function_call":
            named = {"name": self._open["name"], "arguments": self._open["arguments"]}
            events = [self._item_event("response.function_call_arguments.done", **named)]
        else:
            part = self._open["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if self._take_logprobs(part) else {}
            events = [
                self._part_event(f"response.{part['type']}.done", text=part["text"], **logprobs),
                self._part_event("response.content_part.done", part=part),
            ]
        self._open["status"] = "incomplete" if self._status == "incomplete" else "completed"
        events.append(self._state_event("response.output_item.done", self._open))
        self._open = None
        return events

    def _begin_call(self, call: CalledTool) -> list[Event]:
        """Open an item for a call with the arguments so far, and return the events."""
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call.id, "name": call.name}
        self._open = item | {"arguments": "", "status": "in_progress"}
        self._items.append(self._open)
        return [self._state_event("response.output_item.added", self._open), *self._argue(call.arguments)]

    def _argue(self, text: str) -> list[Event]:
        """Add to the arguments of the open call, and return the events."""
        assert self._open is not None
        self._open["arguments"] += text
        return [self._item_event("response.function_call_arguments.delta", delta=text)] if text else []

    def _state_event(self, kind: str, item: Event) -> Event:
        """Return an event with an item as it is now."""
        return self._event(kind, output_index=len(self._items) - 1, item=deepcopy(item))

    def _part_event(self, kind: str, **values: Any) -> Event:
        """Return an event of the open item's part."""
        return self._item_event(kind, content_index=0, **values)

    def _item_event(self, kind: str, **values: Any) -> Event:
        """Return an event of the open item."""
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._items) - 1, **values)

    def _event(self, kind: str, **values: Any) -> Event:
        self._event_count += 1
        return {"type": kind, "sequence_number": self._event_count - 1, **values}
