"""One client request from its check to its last piece of text. Both gateways stream what `Frontend.generate` yields."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.ledger import Record, SpeculationTotals
from orchestrator.metrics import Metrics
from orchestrator.requests import GenerationRequest, Limits, check_tokens, encode_text, to_record
from orchestrator.router import Router
from orchestrator.text import Detokenizer, StopFinder
from wire.errors import InvalidArgument, ServiceError, Unavailable
from wire.messages import FinishReason


@dataclass(frozen=True)
class Chunk:
    """What one message to the client adds. The last one has a finish reason, and the totals."""

    text: str
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    prompt_tokens: int = 0
    completion_tokens: int = 0
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)


class Frontend:
    """What both gateways stand on."""

    def __init__(self, router: Router, tokenizer: Any, limits: Limits, metrics: Metrics, draft_name: str) -> None:
        self.router = router
        self.tokenizer = tokenizer
        self.limits = limits
        self.metrics = metrics
        self.draft_name = draft_name
        self.accepting = True

    async def encode(self, prompt: str | list[int], special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, a long one's found in a thread. Raises InvalidArgument."""
        if not isinstance(prompt, str):
            return check_tokens(prompt, self.limits)
        encode = partial(encode_text, prompt, self.tokenizer, self.limits, special_tokens)
        return await asyncio.to_thread(encode) if len(prompt) > 4096 else encode()

    def prepare(self, request: GenerationRequest, tokens: list[int]) -> Record:
        """Return the record of a request with a prompt of these tokens. Raises ServiceError; nothing is started."""
        if not self.accepting:
            raise Unavailable("the server is shutting down")
        record = to_record(request, tokens, self.limits)
        if self.router.is_open(record.session):
            raise InvalidArgument(f"request_id {record.session!r} is in use", "request_id")
        return record

    async def generate(self, record: Record, stop: list[str]) -> AsyncGenerator[Chunk]:
        """Run a prepared request. Closing the iterator early aborts it; so does `abort`."""
        detokenizer, finder = Detokenizer(self.tokenizer), StopFinder(stop)
        started = time.perf_counter()
        self.metrics.started(record)
        outcome = "error"
        try:
            async with aclosing(self.router.stream(record)) as rounds:
                async for item in rounds:
                    if item.finish_reason is FinishReason.ABORT:
                        outcome = "abort"
                        yield self._last(record, "", [], FinishReason.ABORT)
                        return
                    self.metrics.committed(record, len(item.tokens), time.perf_counter() - started)
                    text = detokenizer.push(item.tokens)
                    if item.finish_reason is not FinishReason.NONE:
                        text += detokenizer.finish()
                    shown, stopped = finder.push(text)
                    if stopped or item.finish_reason is not FinishReason.NONE:
                        reason = FinishReason.STOP if stopped else item.finish_reason
                        outcome = reason.name.lower()
                        yield self._last(record, shown + finder.finish(), item.tokens, reason)
                        return
                    yield Chunk(shown, item.tokens)
        except ServiceError as error:
            outcome = error.status.name.lower()
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "abort"
            raise
        finally:
            self.metrics.finished(record, outcome, time.perf_counter() - started)

    def _last(self, record: Record, text: str, tokens: list[int], reason: FinishReason) -> Chunk:
        return Chunk(text, tokens, reason, record.prompt_tokens, len(record.generated), record.totals)

    def abort(self, request_id: str) -> bool:
        """End a running request; False if there is none of that id."""
        return self.router.abort(request_id)

    async def drain(self, grace: float) -> None:
        """Take no more requests, let the running ones finish for `grace` seconds, then fail the rest."""
        self.accepting = False
        deadline = time.monotonic() + grace
        while self.router.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.router.fail_all(Unavailable("the server is shutting down"))
