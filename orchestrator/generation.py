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
from orchestrator.requests import GenerationRequest, Limits, encode_text, to_record
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
    """What both gateways stand on. Long prompts are tokenized in a thread."""

    def __init__(self, router: Router, tokenizer: Any, limits: Limits, metrics: Metrics, draft_name: str) -> None:
        self.router = router
        self.tokenizer = tokenizer
        self.limits = limits
        self.metrics = metrics
        self.draft_name = draft_name
        self.accepting = True

    async def tokenize(self, text: str, special_tokens: bool = True) -> list[int]:
        return await asyncio.to_thread(encode_text, text, self.tokenizer, self.limits, special_tokens)

    async def prepare(self, request: GenerationRequest) -> Record:
        """Check a request; raises ServiceError before anything is started."""
        if not self.accepting:
            raise Unavailable("the server is shutting down")
        check = partial(to_record, request, self.tokenizer, self.limits)
        record = await asyncio.to_thread(check) if len(request.prompt) > 4096 else check()
        if self.router.is_open(record.session):
            raise InvalidArgument(f"request_id {record.session!r} is in use")
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
