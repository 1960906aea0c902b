"""The answer to a completion, whole or in pieces."""

from orchestrator.api.answers import ChoicesAnswer, Event
from orchestrator.api.logprobs import CompletionLogprobs, Decode, naming
from orchestrator.requests.requests import CompletionRequest
from orchestrator.sessions.generation import Chunk


class CompletionAnswer(ChoicesAnswer):
    """The answer to a completion."""

    whole_object = piece_object = "text_completion"

    def __init__(
        self, name: str, model: str, request: CompletionRequest, prompts: list[list[int]], decode: Decode
    ) -> None:
        """prompts: the tokens of each. decode: gives the text of tokens."""
        n = request.n or 1
        super().__init__(f"cmpl-{name}", model, request, n)
        self._prompts = [tokens for tokens in prompts for _ in range(n)]
        self._echoes = [echo for echo in request.echoes(decode) for _ in range(n)]
        named = naming(request, decode)
        self._logprobs = [CompletionLogprobs(named, tokens if request.echo else []) for tokens in self._prompts]

    def opening(self) -> list[Event]:
        """Return the first events of a stream: the prompts, as text or as tokens, if they are asked for."""
        events = []
        for i, (echo, prompt) in enumerate(zip(self._echoes, self._prompts, strict=True)):
            ids = {"token_ids": [], "prompt_token_ids": prompt} if self._request.return_token_ids else {}
            if echo or ids:
                events.append(self._piece(i, {"text": echo} | ids))
        return events

    def add(self, chunk: Chunk) -> list[Event]:
        self._totals.add(chunk)
        asked = self._request.wanted_logprobs is not None
        logprobs = self._logprobs[chunk.choice].take(chunk) if asked else None
        ids = self._token_ids(chunk.tokens)
        if not (chunk.text or chunk.reason or logprobs or ids):
            return []
        return [self._piece(chunk.choice, {"text": chunk.text} | ids, chunk.reason, logprobs)]
