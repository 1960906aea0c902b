"""The real HTTP gateway, on a port of its own, over a target whose answers a test writes."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from orchestrator.api.http_gateway import make_app
from orchestrator.api.http_requests import OPEN, GuardedHttp, allow_origins, hosts_of
from orchestrator.api.http_server import Connections, serve_http
from orchestrator.requests.access import Proxies
from orchestrator.requests.callers import Callers
from orchestrator.requests.records import Limits
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.ledger import Ledger, Record
from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.observer import Observer
from orchestrator.sessions.response_store import ResponseStore
from orchestrator.sessions.router import TargetState
from orchestrator.text.replies import ReplyFormat
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.wire.errors import ResourceExhausted, ServiceError
from specahead.wire.messages import At, Commit, FinishReason, RoundFigures

ANYONE = Callers([])
MODEL = "tiny-target"
LIMITS = Limits(MODEL, vocab_size=4096, max_context=2048, stop_token_ids=[0])

TEMPLATE = """{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{% if opening is defined %}{{ opening }}{% endif %}"""


class ScriptedRouter:
    """In the place of Router: each session's tokens are those of a text that the test gives, some a round.

    per_round: how many, all but the last of which were drafted.
    answer: the text, or what a session gets by its place among those that are open. refusal: raised instead. full:
    seconds after which refused requests may come back, and all are refused; 0: none is. opened: the records of all
    sessions, in their order. gate: nothing comes while it is closed.
    The target has the KV of the first three tokens of every prompt.
    """

    connected = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.answer: str | list[str] = "The sea was calm, and the old man was glad of it."
        self.refusal: ServiceError | None = None
        self.full = 0
        self.per_round = 2
        self.opened: list[Record] = []
        self.aborted: list[str] = []
        self.ledger = Ledger()
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def running(self) -> int:
        return len(self.ledger.records)

    def target_states(self) -> dict[str, TargetState]:
        return {"target": TargetState(True, self.running, len(self.opened))}

    def check_room(self) -> None:
        if self.full:
            raise ResourceExhausted("the queues of all targets are full", retry_after=self.full)

    def is_open(self, session: str) -> bool:
        return session in self.ledger.records

    def abort(self, session: str) -> bool:
        self.aborted.append(session)
        return True

    def leave(self, error: ServiceError) -> None:
        """Nothing waits here."""

    async def stream(self, record: Record) -> AsyncGenerator[Commit]:
        text = self.answer if isinstance(self.answer, str) else self.answer[len(self.opened)]
        self.opened.append(record)
        self.ledger.open(record)
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), *record.asked.stop_token_ids[:1]]
        reason = FinishReason.STOP if len(tokens) <= record.asked.max_tokens else FinishReason.LENGTH
        tokens, prompt = (
            tokens[: record.asked.max_tokens],
            record.tokens[:] if record.asked.wants_prompt_logprobs else [],
        )
        try:
            await self.gate.wait()
            if self.refusal is not None:
                raise self.refusal
            for number, at in enumerate(range(0, len(tokens), self.per_round)):
                end = at + self.per_round
                last = end >= len(tokens)
                commit = Commit(
                    At(record.session, 0, number, len(record.tokens)),
                    tokens[at:end],
                    drafted=max(4, self.per_round - 1),
                    accepted=self.per_round - 1,
                    cached_tokens=3 if at == 0 else 0,
                    figures=RoundFigures(preemptions=int(last)),
                    logprobs=self._logprobs(record, tokens[at:end]),
                    prompt_logprobs=self._logprobs(record, prompt[1:]) if at == 0 else [],
                    finish_reason=reason if last else FinishReason.NONE,
                )
                self.ledger.apply(commit)
                yield commit
        finally:
            self.ledger.close(record.session)

    def _logprobs(self, record: Record, tokens: list[int]) -> list[TokenLogprobs]:
        """Each token is the second of all; token 5 is the first, and tokens 6, 7 … follow."""
        if not record.asked.wants_logprobs:
            return []
        likely = [-0.25 - 1.5 * (i > 0) - i for i in range(record.asked.alternatives)]
        return [TokenLogprobs(-1.0, [5 + i for i in range(record.asked.alternatives)], likely) for _ in tokens]


def router_of_chats(tokenizer: Any) -> ScriptedRouter:
    """Return a router whose tokenizer has a chat template, TEMPLATE."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return ScriptedRouter(tokenizer)


@contextlib.asynccontextmanager
async def running_gateway(
    router: Any,
    limits: Limits = LIMITS,
    reply_format: ReplyFormat | None = None,
    callers: Callers = ANYONE,
    tracer: Any = None,
    connections: Connections | None = None,
    allowed_hosts: str = "",
    allowed_origins: str = "",
    responses: ResponseStore | None = None,
) -> AsyncIterator[str]:
    """Serve over a scripted router while the context lasts; yields the address."""

    async def read_status() -> dict[str, None]:
        return {"target": None, "draft": None}

    observer = Observer(Metrics(MODEL), router.tokenizer, False, tracer)
    frontend = Frontend(router, router.tokenizer, limits, observer, "tiny-draft", reply_format or ReplyFormat())
    app = make_app(frontend, read_status, lambda: {"target": "127.0.0.1:1", "draft": "127.0.0.1:2"}, responses)
    hosts = hosts_of("127.0.0.1", allowed_hosts)
    app = GuardedHttp(app, callers, OPEN, frontend, Proxies(""), hosts)
    app = allow_origins(app, allowed_origins)
    async with serve_http(app, "127.0.0.1", 0, connections or Connections(100)) as address:
        yield address
