"""A client's request from its check to its last text. Both gateways stream the chunks that `Frontend` yields."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from orchestrator.requests.callers import current_caller
from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.records import Limits, check_tokens, encode_text, to_records
from orchestrator.requests.requests import GenerationRequest
from orchestrator.sessions.ledger import Record, SpeculationTotals
from orchestrator.sessions.observer import Observer
from orchestrator.sessions.router import Router
from orchestrator.text.chat_grammars import chat_grammar
from orchestrator.text.detokenizer import Detokenizer, StopFinder
from orchestrator.text.grammar_compiler import GrammarCompiler
from orchestrator.text.lark import Lark
from orchestrator.text.replies import ReplyFormat, ReplyParser
from orchestrator.text.special_tokens import TextEncoder
from orchestrator.text.structural_tags import tag_grammar
from orchestrator.text.structured_outputs import COMPACT
from orchestrator.text.tokenizing import work_on_text
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.wire.errors import InvalidArgument, NotFound, ServiceError, Unavailable
from specahead.wire.messages import Commit, FinishReason
from specahead.wire.tasks import meanwhile


@dataclass(frozen=True)
class Chunk:
    """One message's addition to a choice, and the counts of tokens so far. The last chunk has a finish reason."""

    text: str
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)
    choice: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, if asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """In the first chunk: of the prompt's tokens from the second on."""
    stop: str = ""
    """In the last chunk: the stop string that has ended it."""

    @property
    def reason(self) -> str | None:
        """OpenAI's word for the finish reason, None if the choice goes on."""
        return None if self.finish_reason is FinishReason.NONE else self.finish_reason.name.lower()


@dataclass(eq=False)
class Frontend:
    """Serves the model's requests for both gateways."""

    router: Router
    tokenizer: Any
    limits: Limits
    observer: Observer
    draft_name: str
    reply_format: ReplyFormat = field(default_factory=ReplyFormat)
    """How the model writes tool calls and reasoning."""

    def __post_init__(self) -> None:
        self.encoder = TextEncoder(self.tokenizer)
        self.accepting = True
        self.created = int(time.time())  # in seconds since 1970
        self._grammars = GrammarCompiler()

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.limits.model_name

    @property
    def ready(self) -> bool:
        """Whether new requests can be served."""
        return self.accepting and self.router.connected

    def check_model(self, name: str | None) -> None:
        """Raise NotFound if a request names another model."""
        if name and name != self.name:
            message = f"The model `{name}` does not exist. Served here: {self.name}"
            raise NotFound(message, "model", "model_not_found")

    def check_room(self) -> None:
        """Raise ResourceExhausted if every request would be refused now.

        Called before a request is parsed, so that refusing many requests costs the running ones little.
        """
        self.router.check_room()

    async def encode(self, prompt: str | list[int], special_tokens: bool = True, rendered: bool = False) -> list[int]:
        """Return the token ids of a prompt; a long text is encoded in a thread. Raises InvalidArgument.

        special_tokens: whether the model's own are put around it. rendered: whether a chat template has made it.
        """
        if not isinstance(prompt, str):
            return check_tokens(prompt, self.limits)
        encode = partial(encode_text, prompt, self.encoder, self.limits, special_tokens, rendered)
        return await work_on_text(encode, len(prompt))

    def reply_parser(self, request: ChatRequest, prompt: str) -> ReplyParser:
        """Return a parser of the answer to a chat. prompt: the chat's text."""
        parser = self.reply_format.parser(prompt, request.offered_tools, request.must_call)
        if parser.splits:  # the marks of a tool call may be special tokens
            request.skip_special_tokens = False
        return parser

    async def grammar(self, request: GenerationRequest, prompt: str = "") -> str:
        """Return the source of the grammar that a request's answer must follow, empty if it is free text.

        prompt: the text of a chat. Raises InvalidArgument.
        """
        structure, main, white_space = request.structure, "", request.white_space or COMPACT
        if structure is None and not (isinstance(request, ChatRequest) and request.tools):
            return ""
        lark = Lark(self.tokenizer, white_space)
        if structure is not None and structure.kind == "structural_tag":
            tags = tag_grammar(structure.text, structure.param, lark)
            structure = replace(structure, kind="lark", text=tags)
        if isinstance(request, ChatRequest):
            main = chat_grammar(request, prompt, self.reply_format, lark)
            structure = None if request.must_call else structure
        return await self._grammars.compile(structure, main, white_space) if main or structure else ""

    def prepare(self, request: GenerationRequest, prompts: list[list[int]], grammar: str = "") -> list[Record]:
        """Return the sessions of a request, n for each prompt, without starting them. Raises ServiceError."""
        if not self.accepting:
            raise Unavailable("the server is shutting down")
        records = to_records(request, prompts, self.limits, grammar)
        for record in records:
            if self.router.is_open(record.session):
                raise InvalidArgument(f"request_id {record.session!r} is in use", "request_id")
        return records

    def generate(self, records: list[Record], request: GenerationRequest) -> AsyncGenerator[Chunk]:
        """Run prepared sessions at the same time. Closing the iterator early aborts them, and so does `abort`.

        Raises ServiceError as soon as one of them fails.
        """
        if len(records) == 1 and not request.only_echoes:  # needs no task and no queue
            return self._generate(records[0], request)
        return self._generate_together(records, request)

    async def _generate_together(self, records: list[Record], request: GenerationRequest) -> AsyncGenerator[Chunk]:
        arrived: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        async def run(record: Record) -> None:
            try:
                async with aclosing(self._generate(record, request)) as chunks:
                    async for chunk in chunks:
                        arrived.put_nowait(chunk)
            except Exception as error:  # raised below, in the caller's task
                arrived.put_nowait(error)

        unfinished = len(records)
        async with meanwhile(*map(run, records)):
            while unfinished:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.finish_reason is not FinishReason.NONE
                yield replace(item, text="", tokens=[], completion_tokens=0) if request.only_echoes else item

    async def _generate(self, record: Record, request: GenerationRequest) -> AsyncGenerator[Chunk]:
        shown = _ShownText(self.tokenizer, request, record)
        watch = self.observer.start(record)
        outcome: str | ServiceError = "error"
        last: Chunk | None = None
        sent = 0  # tokens; the record may hold more
        try:
            async with aclosing(self.router.stream(record)) as rounds:
                async for item in rounds:
                    text = ""
                    if item.finish_reason is not FinishReason.ABORT:
                        text, item = shown.push(item)
                        watch.round(item)
                        sent += len(item.tokens)
                    chunk = Chunk(
                        text,
                        item.tokens,
                        item.finish_reason,
                        prompt_tokens=record.prompt_tokens,
                        cached_tokens=record.cached_tokens,
                        completion_tokens=sent,
                        totals=record.totals,
                        choice=record.asked.choice,
                        logprobs=item.logprobs,
                        prompt_logprobs=item.prompt_logprobs,
                        stop=shown.stop,
                    )
                    if item.finish_reason is not FinishReason.NONE:
                        last = chunk
                        break
                    yield chunk
            if last is not None:  # the session has ended, also on its target
                outcome = last.finish_reason.name.lower()
                yield last
        except ServiceError as error:
            outcome = error
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "abort"
            raise
        finally:
            del record.tokens[record.prompt_tokens + sent :]
            watch.end(outcome)

    def abort(self, request_id: str) -> bool:
        """End a running request of the current caller; return False if there is none with this id.

        request_id: the request's, which ends all its choices, or the name of one choice's session.
        """
        caller = current_caller().name
        mine = [record for record in self.router.ledger.records.values() if record.asked.caller == caller]
        sessions = [record.session for record in mine if request_id in (record.request, record.session)]
        return sum(map(self.router.abort, sessions)) > 0

    async def drain(self, grace: float) -> None:
        """Refuse new requests, let running ones finish for `grace` seconds, then fail the rest."""
        self.accepting = False
        deadline = time.monotonic() + grace
        while self.router.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.router.leave(Unavailable("the server is shutting down"))


class _ShownText:
    """Makes the text of a choice from its tokens, up to its stop string."""

    def __init__(self, tokenizer: Any, request: GenerationRequest, record: Record) -> None:
        """record: of the choice."""
        # A chat's next message begins a text of its own.
        continues = not isinstance(request, ChatRequest) or request.continue_final_message
        before = record.tokens[: record.prompt_tokens] if continues else []
        self._detokenizer = Detokenizer(tokenizer, request.skip_special_tokens is not False, before)
        self._finder = StopFinder(request.stops, bool(request.include_stop_str_in_output))
        self._tokens = 0
        self._min_tokens = record.asked.sampling.min_tokens  # the first tokens, within which no stop string ends

    @property
    def stop(self) -> str:
        """The stop string that has ended the text; empty if none has."""
        return self._finder.found

    def push(self, commit: Commit) -> tuple[str, Commit]:
        """Return the text of a round, and the round, cut behind the token that completes a stop string if one does."""
        hidden = commit.finish_reason is FinishReason.STOP and not self._finder.include  # the last token
        shown = commit.tokens[:-1] if hidden else commit.tokens
        ended = commit.finish_reason is not FinishReason.NONE
        if not self._finder.stop:
            text = self._detokenizer.push(shown)
            return text + self._detokenizer.finish() if ended else text, commit
        shown_text = ""
        for count in range(1, len(commit.tokens) + 1):
            is_last = ended and count == len(commit.tokens)
            text, stopped = self._push_token(shown[count - 1 : count], is_last)
            shown_text += text
            if stopped:
                tokens, logprobs = commit.tokens[:count], commit.logprobs[:count]
                return shown_text, replace(commit, tokens=tokens, logprobs=logprobs, finish_reason=FinishReason.STOP)
        return shown_text, commit

    def _push_token(self, token: list[int], is_last: bool) -> tuple[str, bool]:
        """Return the text that can be shown with one more token, and whether a stop string ends it. token: empty if it
        is not shown.
        """
        text = self._detokenizer.push(token)
        if is_last:
            text += self._detokenizer.finish()
        self._tokens += 1
        text, stopped = self._finder.push(text, self._tokens > self._min_tokens)
        if is_last and not stopped:
            text += self._finder.finish()  # it might have begun a stop string
        return text, stopped
