"""Log probabilities in the form of OpenAI's protocols."""

import re
from collections.abc import Callable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.requests import CompletionRequest
from orchestrator.sessions.generation import Chunk
from specahead.engine.sampling.logprobs import TokenLogprobs

Decode = Callable[[list[int]], str]
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of the letters of byte-level tokenizers
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how other tokenizers name a byte
_LEAST = -9999.0  # as in vLLM: JSON has no infinity


def naming(request: CompletionRequest | ChatRequest, decode: Decode) -> Decode:
    """Return the function that names a token in log probabilities: by its text or, if asked for, by its number."""
    return (lambda tokens: f"token_id:{tokens[0]}") if request.return_tokens_as_token_ids else decode


class CompletionLogprobs:
    """The log probabilities of one choice of a completion."""

    def __init__(self, decode: Decode, prompt: list[int] | None = None) -> None:
        """decode: gives the text of tokens. prompt: its tokens, if they come before the answer's."""
        self._decode, self._prompt, self._offset = decode, prompt or [], 0

    def take(self, chunk: Chunk) -> dict[str, list[Any]]:
        """Return the log probabilities of a chunk, the first time after those of the prompt, whose first is null."""
        entries: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self._prompt:
            self._add(entries, self._prompt[0], None)
        for token, logprobs in zip(self._prompt[1:], chunk.prompt_logprobs, strict=False):
            self._add(entries, token, logprobs)
        for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=False):
            self._add(entries, token, logprobs)
        self._prompt = []
        return entries

    def _add(self, entries: dict[str, list[Any]], token: int, logprobs: TokenLogprobs | None) -> None:
        text = self._decode([token])
        entries["text_offset"].append(self._offset)
        entries["tokens"].append(text)
        entries["token_logprobs"].append(None if logprobs is None else max(logprobs.logprob, _LEAST))
        entries["top_logprobs"].append(None if logprobs is None else self._likely(text, logprobs))
        self._offset += len(text)

    def _likely(self, text: str, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the token, then the likely ones, by text as in vLLM; of tokens with one text the likeliest."""
        likely: dict[str, float] = {}
        for token, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            likely.setdefault(self._decode([token]), max(logprob, _LEAST))
        likely.setdefault(text, max(logprobs.logprob, _LEAST))
        return {text: likely[text]} | likely


def chat_logprobs(chunk: Chunk, decode: Decode, tokenizer: Any) -> list[dict[str, Any]]:
    """Return a chat's log probabilities of a chunk. decode: gives the text of tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": _bytes_of(token, text, tokenizer)}

    entries = []
    for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=False):
        likely = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        entries.append(entry(token, logprobs.logprob) | {"top_logprobs": [entry(*each) for each in likely]})
    return entries


def _bytes_of(token: int, text: str, tokenizer: Any) -> list[int]:
    """Return the bytes of a token, which has a part of a character if its text has a replacement character."""
    if "\ufffd" in text:
        name = str(tokenizer.convert_ids_to_tokens(token))
        if one := _ONE_BYTE.fullmatch(name):
            return [int(one[1], 16)]
        if _BYTES.keys() >= set(name):
            return [_BYTES[letter] for letter in name]
    return list(text.encode())
