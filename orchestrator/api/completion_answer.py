"""The answer to a completion, whole or in pieces."""

import time

from orchestrator.api.answers import Answer, Event, Totals, choice, mark
from orchestrator.api.logprobs import CompletionLogprobs, Decode, naming
from orchestrator.requests.requests import CompletionRequest
from orchestrator.sessions.generation import Chunk


class CompletionAnswer(Answer):
    """The answer to a completion. prompts: the tokens of each. decode: gives the text of tokens."""

    def __init__(
        self, name: str, model: str, request: CompletionRequest, prompts: list[list[int]], decode: Decode
    ) -> None:
        n = request.n or 1
        super().__init__(Totals(n))
        self._request = request
        self._head = {"id": f"cmpl-{name}", "object": "text_completion", "created": int(time.time()), "model": model}
        self._prompts = [tokens for tokens in prompts for _ in range(n)]
        self._echoes = [echo for echo in request.echoes(decode) for _ in range(n)]
        self._texts = [""] * len(self._prompts)
        self._tokens: list[list[int]] = [[] for _ in self._prompts]
        self._reasons: list[str | None] = [None] * len(self._prompts)
        self._logprobs = None
        if request.wanted_logprobs is not None:
            named = naming(request, decode)
            self._logprobs = [CompletionLogprobs(named, tokens if request.echo else []) for tokens in self._prompts]
        self._told: list[Event | None] = [None] * len(self._prompts)

    def opening(self) -> list[Event]:
        """Return what a stream begins with: the prompts, as text or as tokens, if they are asked for."""
        return [
            self._piece(choice(i, {"text": echo} | self._token_ids([], self._prompts[i]), None))
            for i, echo in enumerate(self._echoes)
            if echo or self._request.return_token_ids
        ]

    def add(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return what a stream says of it."""
        self._totals.add(chunk)
        self._texts[chunk.choice] += chunk.text
        self._tokens[chunk.choice] += chunk.tokens
        self._reasons[chunk.choice] = reason = chunk.reason
        told, ids = self._tell_logprobs(chunk), self._token_ids(chunk.tokens)
        if not (chunk.text or reason or told or ids):
            return []
        return [self._piece(choice(chunk.choice, {"text": chunk.text} | mark(chunk) | ids, reason, told))]

    def _tell_logprobs(self, chunk: Chunk) -> Event | None:
        """Return what is said of a chunk's log probabilities, and keep it for the whole."""
        if self._logprobs is None:
            return None
        told, before = self._logprobs[chunk.choice].take(chunk), self._told[chunk.choice]
        self._told[chunk.choice] = told if before is None else {name: before[name] + told[name] for name in told}
        return told

    def _token_ids(self, tokens: list[int], prompt: list[int] | None = None) -> Event:
        """Return what is said of a choice's tokens, nothing unless it is asked for. prompt: the prompt's."""
        if not self._request.return_token_ids:
            return {}
        return {"token_ids": tokens} | ({} if prompt is None else {"prompt_token_ids": prompt})

    def closing(self) -> list[Event]:
        """Return what a stream says when all choices have ended."""
        if not self._request.wants_usage:
            return []
        return [self._head | {"choices": [], "usage": self._totals.usage()} | self._totals.speculation()]

    def whole(self) -> Event:
        """Return the answer in one piece."""
        choices = [
            choice(i, {"text": echo + text} | self._token_ids(self._tokens[i], prompt), reason, told)
            for i, (echo, text, prompt, reason, told) in enumerate(
                zip(self._echoes, self._texts, self._prompts, self._reasons, self._told, strict=True)
            )
        ]
        return self._head | {"choices": choices, "usage": self._totals.usage()} | self._totals.speculation()

    def _piece(self, choice: Event) -> Event:
        return self._head | {"choices": [choice]}
