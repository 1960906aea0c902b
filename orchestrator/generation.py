"""One client request from its check to its last piece of text. Both gateways stream what `Frontend.generate` yields."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.callers import current_caller
from orchestrator.ledger import Record, SpeculationTotals
from orchestrator.metrics import Metrics
from orchestrator.requests import GenerationRequest, Limits, check_tokens, encode_text, to_record
from orchestrator.router import Router
from orchestrator.text import Detokenizer, StopFinder
from wire.errors import InvalidArgument, ServiceError, Unavailable
from wire.messages import FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """What one message to the client adds. The last one has a finish reason, and the totals."""

    text: str
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    prompt_tokens: int = 0
    completion_tokens: int = 0
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)


class _Times:
    """When a request came, and when its rounds did. first: seconds to the first of them, 0 before it."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.first = 0.0

    def round(self) -> float:
        """Return the seconds since the last round or the start: a round is here."""
        now = time.perf_counter()
        since, self._last = now - self._last, now
        self.first = self.first or now - self._start
        return since

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    @property
    def decoding(self) -> float:
        """Seconds from the first round to the last."""
        return self._last - self._start - self.first


class Frontend:
    """What both gateways stand on. log_text: whether prompts and answers are written to the log."""

    def __init__(
        self, router: Router, tokenizer: Any, limits: Limits, metrics: Metrics, draft_name: str, log_text: bool = False
    ) -> None:
        self.router = router
        self.tokenizer = tokenizer
        self.limits = limits
        self.metrics = metrics
        self.draft_name = draft_name
        self.log_text = log_text
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
        times = _Times()
        self._log_start(record)
        outcome = "error"
        try:
            async with aclosing(self.router.stream(record)) as rounds:
                async for item in rounds:
                    if item.finish_reason is FinishReason.ABORT:
                        outcome = "abort"
                        yield self._last(record, "", [], FinishReason.ABORT)
                        return
                    self._count(record, len(item.tokens), times)
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
            outcome = ""
            self.report(error, record)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "abort"
            raise
        finally:
            self.metrics.ended(record)
            if outcome:
                self.metrics.finished(record, outcome, times.total, times.decoding)
                self._log_end(record, outcome, times)

    def _count(self, record: Record, tokens: int, times: "_Times") -> None:
        """Write down that a round came."""
        since_last = times.round()
        self.metrics.committed(record, tokens, times.total, since_last)
        current_caller().pay(tokens)

    def _log_start(self, record: Record) -> None:
        current_caller().pay(record.prompt_tokens)
        if self.log_text:
            prompt = self.tokenizer.decode(record.tokens)
            log.info("request taken", extra={"request": record.session, "key": current_caller().name, "prompt": prompt})

    def _log_end(self, record: Record, outcome: str, times: "_Times") -> None:
        totals = record.totals
        fields = {
            "request": record.session,
            "key": current_caller().name,
            "outcome": outcome,
            "exactness": record.exactness.name.lower(),
            "prompt_tokens": record.prompt_tokens,
            "tokens": len(record.generated),
            "seconds": round(times.total, 4),
            "first_token_seconds": round(times.first, 4),
            "prefill_seconds": round(totals.prefill_seconds, 4),
            "drafted": totals.drafted,
            "accepted": totals.accepted,
        }
        if self.log_text:
            fields["text"] = self.tokenizer.decode(record.generated)
        log.info("request done", extra=fields)

    def report(self, error: ServiceError, record: Record | None = None) -> None:
        """Log and count, once, that a request is refused or, after its first token, that it breaks off."""
        if error.reported:
            return
        error.reported = True
        began = record is not None and bool(record.generated)
        (self.metrics.failed if began else self.metrics.refused)(error.code)
        fields = {"key": current_caller().name, "status": error.http_code, "code": error.code, "param": error.param}
        if record is not None:
            fields["request"] = record.session
        if self.log_text or not isinstance(error, InvalidArgument):  # whose words may be the client's
            fields["reason"] = str(error)
        log.warning("request failed" if began else "request refused", extra=fields)

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
