"""One client request from its check to its last piece of text. Both gateways stream what `Frontend` yields."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.logprobs import TokenLogprobs
from orchestrator.callers import current_caller
from orchestrator.chat_grammars import chat_grammar
from orchestrator.chat_request import ChatRequest
from orchestrator.grammar_compiler import GrammarCompiler
from orchestrator.ledger import Record, SpeculationTotals
from orchestrator.observing import Observer
from orchestrator.records import Limits, check_tokens, encode_text, to_records
from orchestrator.replies import ReplyFormat, ReplyParser
from orchestrator.requests import GenerationRequest
from orchestrator.router import Router
from orchestrator.special_tokens import TextEncoder
from orchestrator.structural_tags import tag_grammar
from orchestrator.text import Detokenizer, StopFinder
from wire.errors import InvalidArgument, ServiceError, Unavailable
from wire.messages import Commit, FinishReason

SHORT_TEXT = 4096  # characters that are worked on at once; longer ones in a thread, so that they hold nobody up


@dataclass(frozen=True)
class Chunk:
    """What one message to the client adds to a choice. The choice's last one has a finish reason, and counts.

    accepted: whether its tokens were drafted and accepted; None unless the request asks for it.
    logprobs: of each token, if asked for. prompt_logprobs: in the first one, of the prompt's tokens but its first.
    """

    text: str
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)
    choice: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: bool | None = None

    @property
    def reason(self) -> str | None:
        """OpenAI's word for the finish reason, None if the choice goes on."""
        return None if self.finish_reason is FinishReason.NONE else self.finish_reason.name.lower()


class Frontend:
    """What both gateways stand on, of one model. reply_format: how the model writes tool calls and its reasoning."""

    def __init__(
        self,
        router: Router,
        tokenizer: Any,
        limits: Limits,
        observer: Observer,
        draft_name: str,
        reply_format: ReplyFormat | None = None,
    ) -> None:
        self.router = router
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer)
        self.limits = limits
        self.observer = observer
        self.draft_name = draft_name
        self.reply_format = reply_format or ReplyFormat()
        self.accepting = True
        self._grammars = GrammarCompiler()

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.limits.model_name

    async def encode(self, prompt: str | list[int], special_tokens: bool = True, rendered: bool = False) -> list[int]:
        """Return the token ids of a prompt, a long one's found in a thread. Raises InvalidArgument.

        special_tokens: whether the model's own are put around it. rendered: whether a chat template has made it.
        """
        if not isinstance(prompt, str):
            return check_tokens(prompt, self.limits)
        encode = partial(encode_text, prompt, self.encoder, self.limits, special_tokens, rendered)
        return await asyncio.to_thread(encode) if len(prompt) > SHORT_TEXT else encode()

    def reply_parser(self, request: ChatRequest, prompt: str) -> ReplyParser:
        """Return what splits the text that follows a chat's prompt."""
        parser = self.reply_format.parser(prompt, request.offered_tools, bool(request.stream), request.must_call)
        if parser.splits:  # what opens and closes a tool call may be a special token
            request.skip_special_tokens = False
        return parser

    async def grammar(self, request: GenerationRequest, prompt: str = "") -> str:
        """Return the source of what a request's text must follow, empty if it is free. Raises InvalidArgument.

        prompt: the text of a chat's.
        """
        structure, main = request.structure, ""
        if structure is not None and structure.kind == "structural_tag":
            lark = tag_grammar(structure.text, structure.param, self.tokenizer)
            structure = replace(structure, kind="lark", text=lark)
        if isinstance(request, ChatRequest):
            main = chat_grammar(request, prompt, self.reply_format, self.tokenizer)
            structure = None if request.must_call else structure
        return await self._grammars.compile(structure, main) if main or structure else ""

    def prepare(self, request: GenerationRequest, prompts: list[list[int]], grammar: str = "") -> list[Record]:
        """Return the records of a request, n for each of its prompts. Raises ServiceError; nothing is started."""
        if not self.accepting:
            raise Unavailable("the server is shutting down")
        records = to_records(request, prompts, self.limits, grammar)
        for record in records:
            if self.router.is_open(record.session):
                raise InvalidArgument(f"request_id {record.session!r} is in use", "request_id")
        return records

    def generate(self, records: list[Record], request: GenerationRequest) -> AsyncGenerator[Chunk]:
        """Run prepared records beside each other. Closing the iterator early aborts them; so does `abort`.

        Raises ServiceError as soon as one of them fails.
        """
        if len(records) == 1 and not request.only_echoes:  # without a task and a queue between it and its client
            return self._generate(records[0], request, 0)
        return self._generate_together(records, request)

    async def _generate_together(self, records: list[Record], request: GenerationRequest) -> AsyncGenerator[Chunk]:
        arrived: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        async def run(record: Record, choice: int) -> None:
            try:
                async with aclosing(self._generate(record, request, choice)) as chunks:
                    async for chunk in chunks:
                        arrived.put_nowait(chunk)
            except Exception as error:  # raised below, where someone listens
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(run(record, choice)) for choice, record in enumerate(records)]
        unfinished = len(tasks)
        try:
            while unfinished:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.finish_reason is not FinishReason.NONE
                yield replace(item, text="", tokens=[], completion_tokens=0) if request.only_echoes else item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, record: Record, request: GenerationRequest, choice: int) -> AsyncGenerator[Chunk]:
        shown = _ShownText(self.tokenizer, request, record.sampling.min_tokens)
        watch = self.observer.start(record)
        outcome: str | ServiceError = "error"
        told = 0  # tokens; the record may be ahead of what is told
        try:
            async with aclosing(self.router.stream(record)) as rounds:
                async for item in rounds:
                    if item.finish_reason is FinishReason.ABORT:
                        outcome = "abort"
                        yield _last(Chunk("", choice=choice), record, FinishReason.ABORT, told)
                        return
                    watch.round(item)
                    for part, accepted in _parts(item, bool(request.mark_accepted)):
                        text, stopped = shown.push(part)
                        told += len(part.tokens)
                        chunk = Chunk(
                            text,
                            part.tokens,
                            totals=record.totals,
                            choice=choice,
                            logprobs=part.logprobs,
                            prompt_logprobs=part.prompt_logprobs,
                            accepted=accepted,
                        )
                        if stopped or part.finish_reason is not FinishReason.NONE:
                            reason = FinishReason.STOP if stopped else part.finish_reason
                            outcome = reason.name.lower()
                            yield _last(replace(chunk, text=text + shown.rest()), record, reason, told)
                            return
                        yield chunk
        except ServiceError as error:
            outcome = error
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "abort"
            raise
        finally:
            watch.end(outcome)

    def abort(self, request_id: str) -> bool:
        """End a running request of the current caller, all of its choices; False if there is none of that id.

        A choice by itself goes by the name of its session.
        """
        caller = current_caller().name
        mine = [record for record in self.router.ledger.records.values() if record.caller == caller]
        sessions = [record.session for record in mine if request_id in (record.request, record.session)]
        return sum(map(self.router.abort, sessions)) > 0

    async def drain(self, grace: float) -> None:
        """Take no more requests, let the running ones finish for `grace` seconds, then fail the rest."""
        self.accepting = False
        deadline = time.monotonic() + grace
        while self.router.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.router.leave(Unavailable("the server is shutting down"))


class _ShownText:
    """The text of a choice, as much of it as may be shown. unending: first tokens that no stop string ends."""

    def __init__(self, tokenizer: Any, request: GenerationRequest, unending: int) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.skip_special_tokens is not False)
        self._with_stop = bool(request.include_stop_str_in_output)
        self._finder = StopFinder(request.stops, self._with_stop)
        self._unending = unending

    def push(self, commit: Commit) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string was met."""
        tokens = commit.tokens
        if commit.finish_reason is FinishReason.STOP and not self._with_stop:
            tokens = tokens[:-1]  # the token that ends the text is not in it
        begun = self._detokenizer.push(tokens[: self._unending])  # what a stop string may not end yet
        text = self._detokenizer.push(tokens[self._unending :])
        self._unending = max(0, self._unending - len(tokens))
        if commit.finish_reason is not FinishReason.NONE:
            text += self._detokenizer.finish()
        text, stopped = self._finder.push(text)
        return begun + text, stopped

    def rest(self) -> str:
        """Return what was held back as it might have begun a stop string."""
        return self._finder.finish()


def _parts(commit: Commit, marked: bool) -> list[tuple[Commit, bool | None]]:
    """Return a round with None or, if `marked`, what of it was drafted and what is the target's own apart, with whether
    it was drafted. The last part has the finish reason."""
    if not marked:
        return [(commit, None)]
    cut = commit.confirmed + commit.accepted
    drafted = replace(commit, tokens=commit.tokens[:cut], logprobs=commit.logprobs[:cut])
    own = replace(commit, tokens=commit.tokens[cut:], logprobs=commit.logprobs[cut:])
    if not (drafted.tokens and own.tokens):
        return [(drafted, True) if drafted.tokens else (own, False)]
    return [(replace(drafted, finish_reason=FinishReason.NONE), True), (replace(own, prompt_logprobs=[]), False)]


def _last(chunk: Chunk, record: Record, reason: FinishReason, told: int) -> Chunk:
    """Return a choice's last chunk, behind which the client has been told so many tokens."""
    return replace(
        chunk,
        finish_reason=reason,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=told,
        totals=record.totals,
    )
