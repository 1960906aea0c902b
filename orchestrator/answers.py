"""The JSON of an answer, whole or in pieces, to a completion or to a chat."""

import time
from collections.abc import Mapping
from typing import Any

from orchestrator.generation import Chunk
from orchestrator.ledger import Record
from wire.errors import ServiceError
from wire.messages import FinishReason


def error_body(error: ServiceError) -> dict[str, Any]:
    """Return OpenAI's account of an error."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def error_headers(error: ServiceError) -> dict[str, str]:
    """Return what HTTP says of an error beside its body."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    return headers | ({"WWW-Authenticate": "Bearer"} if error.http_code == 401 else {})


class Answer:
    """The JSON bodies of one answer, to a chat or to a completion."""

    def __init__(self, chat: bool, record: Record, model: str) -> None:
        self._chat = chat
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._kind = "chat.completion" if chat else "text_completion"
        self._piece_kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = {"id": prefix + record.session, "created": int(time.time()), "model": model}

    def whole(self, text: str, last: Chunk) -> dict[str, Any]:
        """Return the answer that has this text."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = _choice(content, last.finish_reason)
        return self._head | {"object": self._kind, "choices": [choice]} | _usage(last)

    def opening(self) -> list[dict[str, Any]]:
        """Return what a stream begins with."""
        content = {"delta": {"role": "assistant", "content": ""}}
        return [self._piece([_choice(content, FinishReason.NONE)])] if self._chat else []

    def pieces(self, chunk: Chunk, usage: bool) -> list[dict[str, Any]]:
        """Return what a stream says of a chunk, the last one's usage apart if that is asked for."""
        text, last = chunk.text, chunk.finish_reason is not FinishReason.NONE
        content = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        said = [self._piece([_choice(content, chunk.finish_reason)])] if text or last else []
        return said + ([self._piece([]) | _usage(chunk)] if last and usage else [])

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self._piece_kind, "choices": choices}


def _choice(content: Mapping[str, Any], reason: FinishReason) -> dict[str, Any]:
    name = None if reason is FinishReason.NONE else reason.name.lower()
    return {"index": 0, **content, "logprobs": None, "finish_reason": name}


def _usage(last: Chunk) -> dict[str, Any]:
    return {
        "usage": {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "total_tokens": last.prompt_tokens + last.completion_tokens,
        },
        "speculation": last.totals.summary(),
    }
