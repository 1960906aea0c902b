"""Reports requests to metrics, log, traces and dashboard: ids, names of keys and times.

The log has prompts and answers only if `log_text` is set. Without it, the messages of InvalidArgument are left out too,
since they may quote a client's text.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

from orchestrator.api.dashboard.feed import Feed
from orchestrator.api.dashboard.history import History
from orchestrator.requests.callers import current_caller
from orchestrator.sessions.ledger import Record
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.tracing import RequestTrace, follow
from specahead.config.logs import FrequentWarnings
from specahead.wire.errors import InvalidArgument, ServiceError
from specahead.wire.messages import Commit

log = logging.getLogger(__name__)


class Observer:
    """Reports requests."""

    def __init__(self, metrics: Metrics, tokenizer: Any, log_text: bool = False, tracer: Any = None) -> None:
        """tracer: makes spans, None for no traces."""
        self.metrics = metrics
        self.feed, self.history = Feed(), History()
        self._tracer = tracer
        self._tokenizer = tokenizer
        self._log_text = log_text
        self._refusals = FrequentWarnings(log)

    def start(self, record: Record) -> "Watch":
        """Begin to watch a request. Its prompt is taken from its caller's tokens."""
        caller = current_caller()
        caller.pay(record.prompt_tokens)
        if self._log_text:
            fields = {"request": record.session, "key": caller.name, "prompt": self._tokenizer.decode(record.tokens)}
            log.info("request accepted", extra=fields)
        trace = RequestTrace(self._tracer, record, caller.name) if self._tracer is not None else None
        return Watch(record, self, trace)

    def follow(self, headers: Iterable[tuple[Any, Any]]) -> None:
        """Make this task's requests part of the trace in their headers."""
        if self._tracer is not None:
            follow(dict(headers))

    def end(self, watch: "Watch", outcome: str) -> None:
        """Report a request that came to its end or was aborted."""
        record, totals = watch.record, watch.record.totals
        self.metrics.finished(record, outcome, watch.seconds, watch.decode_seconds)
        fields = {
            "request": record.session,
            "key": current_caller().name,
            "outcome": outcome,
            "exactness": record.asked.exactness.name.lower(),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "tokens": len(record.generated),
            "seconds": round(watch.seconds, 4),
            "first_token_seconds": round(watch.first_seconds, 4),
            "queue_seconds": round(totals.figures.queue_seconds, 4),
            "preemptions": totals.figures.preemptions,
            "prefill_seconds": round(totals.figures.prefill_seconds, 4),
            "drafted": totals.drafted,
            "accepted": totals.accepted,
        }
        if self._log_text:
            fields["text"] = self._tokenizer.decode(record.generated)
        log.info("request done", extra=fields)

    def report(self, error: ServiceError, record: Record | None = None, request: str | None = None) -> None:
        """Report once that a request is refused, or that it breaks off after its first token.

        Since anybody can cause many refusals, the log has at most one line a second for each code. request: the id of a
        request without a record.
        """
        if error.reported:
            return
        error.reported = True
        began = record is not None and bool(record.generated)
        self.metrics.unfinished(error.code, began)
        fields = {
            "request": request if record is None else record.session,
            "key": current_caller().name,
            "status": error.http_code,
            "code": error.code,
            "param": error.param,
        }
        if self._log_text or not isinstance(error, InvalidArgument):
            fields["reason"] = str(error)
        if began:
            log.warning("request failed", extra=fields)
        else:
            self._refusals.warn("request refused", error.code, fields)


class Watch:
    """The times of one request."""

    def __init__(self, record: Record, observer: Observer, trace: RequestTrace | None) -> None:
        self.record = record
        self._trace = trace
        self.first_seconds = 0.0  # from the start to the first round, 0 before it
        self._observer = observer
        self._watched = observer.feed.open(record)
        observer.history.open()
        self._start = self._last = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def decode_seconds(self) -> float:
        """The seconds from the first round to the last."""
        return self._last - self._start - self.first_seconds

    def round(self, commit: Commit) -> None:
        """Report a round. Its tokens are taken from the caller's."""
        now, tokens = time.perf_counter(), len(commit.tokens)
        first, seconds = not self.first_seconds, now - self._last
        self.first_seconds = self.first_seconds or now - self._start
        self._observer.metrics.committed(self.record, commit, first, seconds)
        self._observer.feed.round(self._watched, commit, self.first_seconds)
        self._observer.history.round(commit, self.record.prompt_tokens, seconds, first)
        if self._trace is not None:
            self._trace.round(commit, seconds)
        self._last = now
        current_caller().pay(tokens)

    def end(self, outcome: str | ServiceError) -> None:
        """Report the end: the name of the finish reason, or the error that broke the request off."""
        self._observer.metrics.ended(self.record)
        code = outcome.code if isinstance(outcome, ServiceError) else outcome
        self._observer.feed.end(self._watched, code, self.seconds)
        self._observer.history.end(None if isinstance(outcome, ServiceError) or outcome == "abort" else self.seconds)
        if self._trace is not None:
            self._trace.end(self.record, outcome)
        if isinstance(outcome, ServiceError):
            self._observer.report(outcome, self.record)
        else:
            self._observer.end(self, outcome)
