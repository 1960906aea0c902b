"""The answer to a request of OpenAI's Responses: items, or events that build them."""

import secrets
import time
from copy import deepcopy
from typing import Any

from orchestrator.answers import Answer, Event, Totals
from orchestrator.generation import Chunk
from orchestrator.replies import CalledTool, Delta, ReplyParser
from orchestrator.responses_request import ResponsesRequest
from wire.errors import ServiceError

# What a response repeats of its request.
_REPEATED = {
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature"),
    *("tool_choice", "tools", "top_p"),
}


class ResponsesAnswer(Answer):
    """The answer to a request for a response. parser: of its text, None if all of it is one message."""

    final_event = ""

    def __init__(
        self, name: str, model: str, request: ResponsesRequest, parser: ReplyParser | None, totals: Totals
    ) -> None:
        super().__init__(totals)
        self._name, self._model, self._request, self._parser = name, model, request, parser
        self._created = int(time.time())
        self._items: list[Event] = []
        self._open: Event | None = None  # the item that text is added to
        self._status = "in_progress"
        self._said = 0

    def opening(self) -> list[Event]:
        """Return what a stream begins with."""
        return [self._event(kind, response=self.whole()) for kind in ("response.created", "response.in_progress")]

    def add(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return what a stream says of it."""
        self._totals.add(chunk)
        deltas = [Delta(chunk.text)] if chunk.text else []
        if self._parser is not None:
            deltas = self._parser.feed(chunk.text, chunk.reason is not None)
        said = [event for delta in deltas for event in self._take(delta)]
        if chunk.reason is not None:
            self._status = "incomplete" if chunk.reason == "length" else "completed"
            said += self._close()
        return said

    def closing(self) -> list[Event]:
        """Return what a stream says when all has ended."""
        return [self._event(f"response.{self._status}", response=self.whole())]

    def failure(self, error: ServiceError) -> Event:
        """Return what a stream says of an error."""
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
            "output": deepcopy(self._items),  # which go on while this is told
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        } | (self._totals.speculation() if ended else {})

    def _usage(self) -> Event:
        prompt, cached, generated = self._totals.counts()
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        }

    def _take(self, delta: Delta) -> list[Event]:
        """Add a delta to the items, and return the events of it."""
        if delta.call is not None:
            calls = sum(item["type"] == "function_call" for item in self._items)
            return [] if self._request.parallel_tool_calls is False and calls else self._call(delta.call)
        kind, text = ("message", delta.content) if delta.content else ("reasoning", delta.reasoning)
        said = []
        if self._open is None or self._open["type"] != kind:
            said = self._close() + self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        return [*said, self._part_event(f"response.{part['type']}.delta", delta=text)]

    def _begin(self, kind: str) -> list[Event]:
        """Open a message or a reasoning item with one empty part of text."""
        number = secrets.token_hex(12)
        if kind == "message":
            item: Event = {"id": f"msg_{number}", "type": kind, "role": "assistant"}
            part: Event = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{number}", "type": kind, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._open = item | {"status": "in_progress", "content": []}
        self._items.append(self._open)
        added = self._item_event("response.output_item.added", self._open)
        self._open["content"].append(part)
        return [added, self._part_event("response.content_part.added", part=dict(part))]

    def _close(self) -> list[Event]:
        """End the item that is open, if there is one."""
        if self._open is None:
            return []
        part = self._open["content"][0]
        said = [
            self._part_event(f"response.{part['type']}.done", text=part["text"]),
            self._part_event("response.content_part.done", part=part),
        ]
        self._open["status"] = "incomplete" if self._status == "incomplete" else "completed"
        said.append(self._item_event("response.output_item.done", self._open))
        self._open = None
        return said

    def _call(self, call: CalledTool) -> list[Event]:
        """Add a call as an item of its own."""
        said = self._close()
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call.id, "name": call.name}
        self._items.append(item | {"arguments": call.arguments, "status": "completed"})
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        begun = item | {"arguments": "", "status": "in_progress"}
        return [
            *said,
            self._item_event("response.output_item.added", begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._item_event("response.output_item.done", self._items[-1]),
        ]

    def _item_event(self, kind: str, item: Event) -> Event:
        return self._event(kind, output_index=len(self._items) - 1, item=deepcopy(item))

    def _part_event(self, kind: str, **values: Any) -> Event:
        """Return an event of the open item's part; events of visible text have a place for log probabilities."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **place, **values, **({"logprobs": []} if "output_text" in kind else {}))

    def _event(self, kind: str, **values: Any) -> Event:
        self._said += 1
        return {"type": kind, "sequence_number": self._said - 1, **values}
