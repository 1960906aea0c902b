"""Log probabilities as OpenAI's protocols word them."""

from collections.abc import Callable
from typing import Any

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.requests import CompletionRequest
from orchestrator.sessions.generation import Chunk
from specahead.engine.sampling.logprobs import TokenLogprobs

Decode = Callable[[list[int]], str]
_LEAST = -9999.0  # as vLLM: JSON has no infinity


def naming(request: CompletionRequest | ChatRequest, decode: Decode) -> Decode:
    """Return what gives a token its name in log probabilities: `decode`, by its text, or by its number as asked for."""
    return (lambda tokens: f"token_id:{tokens[0]}") if request.return_tokens_as_token_ids else decode


class CompletionLogprobs:
    """What a completion tells of one choice's tokens. prompt: its tokens, if they are told before the others.

    decode: gives the text of tokens.
    """

    def __init__(self, decode: Decode, prompt: list[int] | None = None) -> None:
        self._decode, self._prompt, self._offset = decode, prompt or [], 0

    def take(self, chunk: Chunk) -> dict[str, list[Any]]:
        """Return what is told of a chunk's tokens; with the first one of the prompt's, whose first has no logprob."""
        told: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self._prompt:
            self._add(told, self._prompt[0], None)
        for token, logprobs in zip(self._prompt[1:], chunk.prompt_logprobs, strict=False):
            self._add(told, token, logprobs)
        for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=False):
            self._add(told, token, logprobs)
        self._prompt = []
        return told

    def _add(self, told: dict[str, list[Any]], token: int, logprobs: TokenLogprobs | None) -> None:
        text = self._decode([token])
        told["text_offset"].append(self._offset)
        told["tokens"].append(text)
        told["token_logprobs"].append(None if logprobs is None else max(logprobs.logprob, _LEAST))
        told["top_logprobs"].append(None if logprobs is None else self._likely(text, logprobs))
        self._offset += len(text)

    def _likely(self, text: str, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the token itself and the likely ones by their texts, as vLLM in this order; of tokens of one text the
        likeliest."""
        likely: dict[str, float] = {}
        for token, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            likely.setdefault(self._decode([token]), max(logprob, _LEAST))
        likely.setdefault(text, max(logprobs.logprob, _LEAST))
        return {text: likely[text]} | likely


def chat_logprobs(chunk: Chunk, decode: Decode) -> list[dict[str, Any]]:
    """Return what a chat tells of a chunk's tokens. decode: gives the text of tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}

    told = []
    for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=False):
        likely = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        told.append(entry(token, logprobs.logprob) | {"top_logprobs": [entry(*each) for each in likely]})
    return told
