"""`specahead.LLM`: a target and a draft in this process, and answers to many prompts at once."""

import asyncio
import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from os import PathLike
from typing import Any, Self

from tqdm import tqdm

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.requests import GenerationRequest, read_request
from orchestrator.sessions.generation import Chunk, Frontend
from orchestrator.sessions.ledger import Record
from orchestrator.text.chat import render_chat
from specahead.config.clock import clock
from specahead.config.process import prepare_process
from specahead.config.resolve import read_values
from specahead.offline.engine import Engine
from specahead.offline.sampling import Output, SamplingParams
from specahead.wire.errors import InvalidArgument, ServiceError
from specahead.wire.tasks import end_tasks

Model = str | PathLike[str]
Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_DELAY = 2.0  # seconds before a bar is shown


class LLM:
    """A model with its draft, loaded into this process. Use it as a context manager, or `close` it.

    Its methods wait for all answers, and several threads may call them. They raise ValueError for a prompt or a
    parameter that is refused, RuntimeError if the services fail.
    """

    def __init__(self, target: Model = "", draft: Model = "", **settings: Any) -> None:
        """Load the models.

        target: a Hugging Face id or a folder; with "" the bundled pair is loaded. draft: the same, or lookup, self,
        auto or none; with "" a target drafts for itself where that pays. settings: those of `specahead serve` that
        concern target and draft, such as max_model_len=8192. Raises ValueError for a setting that is not allowed,
        OSError or the loader's own error for a model that cannot be loaded.
        """
        prepare_process()
        models = {name: str(model) for name, model in (("target", target), ("draft", draft)) if str(model)}
        config = read_values(models | settings)
        self._at_once = 2 * config.target.max_sessions  # so that a prompt waits when a session ends
        with clock("loading the models"):
            self._engine = Engine(config)
        weakref.finalize(self, self._engine.close)  # also at the end of the process

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None) -> list[Output]:
        """Continue a prompt or several, each a text or token ids; return an output for each, in their order."""
        fields = (sampling or SamplingParams()).values
        single = isinstance(prompts, str) or not isinstance(next(iter(prompts), ""), str | Sequence)
        given: list[Any] = [prompts] if single else list(prompts)
        with _plain_errors():
            requests = [read_request(GenerationRequest, fields) for _ in given]
            texts = [prompt if isinstance(prompt, str) else [int(token) for token in prompt] for prompt in given]
            return self._answer(requests, texts, rendered=False)

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling: SamplingParams | None = None
    ) -> list[Output]:
        """Give the next message of a conversation or of several, by the model's chat template.

        messages: as in OpenAI's API. A text is as the model writes it, with the marks of reasoning and calls of tools.
        """
        fields, frontend = (sampling or SamplingParams()).values, self._engine.frontend
        given: list[Any] = [messages] if isinstance(next(iter(messages), None), Mapping) else list(messages)
        with _plain_errors():
            each = [fields | {"messages": [dict(message) for message in conversation]} for conversation in given]
            requests = [read_request(ChatRequest, values) for values in each]
            texts = [render_chat(r, frontend.tokenizer, frontend.reply_format, frontend.encoder) for r in requests]
            return self._answer(requests, texts, rendered=True)

    def close(self) -> None:
        """End the services and free their memory."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self, requests: Sequence[GenerationRequest], prompts: Sequence[str | list[int]], rendered: bool
    ) -> list[Output]:
        """Return the answers. rendered: whether a chat template has made the prompts."""
        return self._engine.call(_answer_all(self._engine.frontend, self._at_once, requests, prompts, rendered))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise Python's errors for those of a server."""
    try:
        yield
    except InvalidArgument as error:
        raise ValueError(str(error)) from None
    except ServiceError as error:
        raise RuntimeError(str(error)) from error


async def _answer_all(
    frontend: Frontend,
    at_once: int,
    requests: Sequence[GenerationRequest],
    prompts: Sequence[str | list[int]],
    rendered: bool,
) -> list[Output]:
    """Check all prompts, then generate, this many at once. Raises ServiceError for the first that fails."""
    records = [
        await _prepared(frontend, request, prompt, rendered) for request, prompt in zip(requests, prompts, strict=True)
    ]
    places = asyncio.Semaphore(at_once)
    bar = tqdm(total=len(records), desc="generating", unit="prompt", delay=_DELAY, leave=False, disable=None)

    async def answer(record: Record, request: GenerationRequest) -> Output:
        async with places:
            output = await _answer(frontend, record, request)
        bar.update()
        return output

    tasks = [asyncio.create_task(answer(*both)) for both in zip(records, requests, strict=True)]
    with bar:
        try:
            return await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)


async def _prepared(frontend: Frontend, request: GenerationRequest, prompt: str | list[int], rendered: bool) -> Record:
    """Return the session of a request. Raises ServiceError."""
    tokens = await frontend.encode(prompt, not rendered, rendered)
    grammar = await frontend.grammar(request, prompt if isinstance(prompt, str) and rendered else "")
    record, *others = frontend.prepare(request, [tokens], grammar)
    if others:
        raise InvalidArgument("n: there is one output for each prompt; give a prompt as often as needed", "n")
    return record


async def _answer(frontend: Frontend, record: Record, request: GenerationRequest) -> Output:
    text: list[str] = []
    tokens: list[int] = []
    last = Chunk("")
    async with aclosing(frontend.generate([record], request)) as chunks:
        async for last in chunks:
            text.append(last.text)
            tokens += last.tokens
    return Output("".join(text), tokens, last.reason or "", last.prompt_tokens, last.cached_tokens, last.totals)
