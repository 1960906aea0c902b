"""Which sessions are open: what may be opened, who waits for room, who runs, and whose pages are still to be released.

Room is reserved when a session starts to run, for all that it may come to hold: nothing that runs is ever evicted.
Orchestrators share places and queue: none is kept out by another's many sessions. `emit` tells who opened a session.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from config import TargetSettings
from engine.grammars import Grammars, GrammarState
from engine.kv.pages import PAGE_SIZE, pages_for
from engine.logit_rules import rules_of
from engine.runner import Runner
from sparsity.methods import METHODS, methods_of
from sparsity.plan import Plan
from sparsity.reader import Reader
from target_service.session import TargetSession
from wire.errors import InvalidArgument, ResourceExhausted
from wire.messages import Exactness, Open, ServedEvent


class Admission:
    """Owns the table of sessions and the reservation of KV pages.

    running: sessions that have room, by name, in the order in which they got it. queue: those that wait for room.
    reserved: KV pages that sessions may come to hold. report_blocks: whether the readers of sessions report which
    blocks they read. grammars: what compiles those of sessions; None: sessions have none.
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        settings: TargetSettings,
        counters: Counter[str],
        report_blocks: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        self.running: dict[str, TargetSession] = {}
        self._kv, self._vocab_size = runner.kv, runner.vocab_size
        self._plan, self._settings, self._counters = plan, settings, counters
        self._methods = methods_of(plan)
        self._report_blocks, self._grammars = report_blocks, grammars
        self.queue: deque[TargetSession] = deque()
        self._closed: list[TargetSession] = []  # whose pages a step that runs may still write
        self.reserved = 0
        self._first_epoch = 0  # of sessions to come: above all that were, so that a name can be used again

    def everyone(self) -> Iterator[TargetSession]:
        """Yield all open sessions, those that wait included."""
        yield from self.running.values()
        yield from self.queue

    def is_open(self, session: TargetSession) -> bool:
        """Return whether a running session is still the one of its name; it may have ended during a step."""
        return self.running.get(session.id) is session

    # Opening.

    def open(self, request: Open, emit: Callable[[ServedEvent], None]) -> None:
        """Queue a session. Raises InvalidArgument if it can never run, ResourceExhausted if there is no room for it.

        Where all places of the queue are taken, whoever has the most of them gives one to one who has fewer.
        """
        self._check_request(request)
        self._make_room(request.prompt_tokens + request.max_tokens, emit)
        grammar = self._grammar(request)
        stop_token_ids = [token for token in request.stop_token_ids if token < self._vocab_size]  # others never come
        rules = rules_of(request.sampling, request.prompt_tokens, stop_token_ids)
        session = TargetSession(
            id=request.session,
            tokens=list(request.tokens),
            prompt_tokens=request.prompt_tokens,
            max_length=request.prompt_tokens + request.max_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            sampling=request.sampling,
            emit=emit,
            rules=rules if grammar is None else (*rules, grammar),
            grammar=grammar,
            logprobs=request.alternatives if request.wants_logprobs else None,
            prompt_logprobs=[] if request.wants_logprobs and request.wants_prompt_logprobs else None,
            reader=self._reader(request),
        )
        session.kv.dense = session.reads_all
        self.queue.append(session)

    def _reader(self, request: Open) -> Reader | None:
        """Return how a session reads, None for everything. Raises InvalidArgument for a method that the plan lacks."""
        if request.exactness is Exactness.EXACT:
            return None
        name = request.sparsity or self._plan.method
        if name not in self._methods:
            raise InvalidArgument(
                f"session {request.session}: sparsity must be one of {', '.join(self._methods)}; got {name!r}"
            )
        return Reader(METHODS[name], self._plan, self._report_blocks)

    def _grammar(self, request: Open) -> GrammarState | None:
        """Return the grammar that a session's text must follow, which begins to compile; None if there is none."""
        if not request.grammar:
            return None
        if self._grammars is None or self._settings.synthetic_acceptance >= 0:
            raise InvalidArgument(f"session {request.session}: this target follows no grammars")
        return self._grammars.start(request.grammar, request.tokens, request.prompt_tokens)

    def _check_request(self, request: Open) -> None:
        """Raise InvalidArgument for a request that can never run."""
        length, limit = request.prompt_tokens + request.max_tokens, self._settings.max_context
        if any(session.id == request.session for session in self.everyone()):
            raise InvalidArgument(f"session {request.session} is open already")
        if not 1 <= request.prompt_tokens <= len(request.tokens):
            raise InvalidArgument(f"{request.prompt_tokens} prompt tokens among {len(request.tokens)} tokens")
        if not all(token < self._vocab_size for token in request.tokens):
            raise InvalidArgument(f"a prompt token lies outside the vocabulary of {self._vocab_size}")
        if not all(token < self._vocab_size for token in request.sampling.logit_bias):
            raise InvalidArgument(f"logit_bias: a token lies outside the vocabulary of {self._vocab_size}")
        if request.wants_logprobs and self._settings.synthetic_acceptance >= 0:
            raise InvalidArgument("logprobs: verdicts are imposed here (synthetic_acceptance), not the model's")
        if request.max_tokens < 1 or len(request.tokens) >= length:
            raise InvalidArgument(f"max_tokens {request.max_tokens} leaves nothing to generate")
        if length > limit:
            raise InvalidArgument(
                f"{request.prompt_tokens} prompt tokens and max_tokens {request.max_tokens} exceed the context of "
                f"{limit} tokens"
            )
        need = self._need(length)
        if need > self._kv.pool.num_pages:
            raise InvalidArgument(
                f"{length} tokens need {need} KV pages of {PAGE_SIZE}, the target has {self._kv.pool.num_pages}"
            )

    def _make_room(self, length: int, emit: Callable[[ServedEvent], None]) -> None:
        """Raise ResourceExhausted if a session of `length` tokens may not even wait for room."""
        while True:
            try:
                self._check_room(length)
                return
            except ResourceExhausted:
                waiting = Counter(session.emit for session in self.queue)
                most = max(waiting, key=waiting.__getitem__, default=emit)
                if waiting[most] <= waiting[emit] + 1:
                    raise
                newest = next(session for session in reversed(self.queue) if session.emit == most)
                self.queue.remove(newest)
                newest.fail(ResourceExhausted("its place in the queue is needed for another client; try again later"))

    def _check_room(self, length: int) -> None:
        """Raise ResourceExhausted if a session of `length` tokens may not even wait for room."""
        need = self._need(length)
        waiting, most = self._waiting_with(need), self._settings.max_queued
        if waiting > most:
            raise ResourceExhausted(
                f"no place is free, and {waiting - 1} sessions are queued already of at most {most}; try again later"
            )
        taken = self.reserved - self._leaving + sum(self._need(session.max_length) for session in self.queue)
        if self._kv.offloads and taken + need > self._kv.pool.num_pages:
            raise ResourceExhausted(
                f"{length} tokens need {need} KV pages, open sessions have {taken} of the {self._kv.pool.num_pages} "
                "in host memory; try again later"
            )

    def _waiting_with(self, need: int) -> int:
        """Return how many sessions the next step would leave in the queue if one more of `need` pages were in it."""
        places = self._settings.max_sessions - len(self.running)
        room = self._kv.pool.num_pages - self.reserved + self._leaving
        needs = [*(self._need(session.max_length) for session in self.queue), need]
        admitted = 0
        while admitted < min(places, len(needs)) and needs[admitted] <= room:
            room -= needs[admitted]
            admitted += 1
        return len(needs) - admitted

    @property
    def _leaving(self) -> int:
        """Reserved pages of sessions that have ended."""
        return sum(self._need(session.max_length) for session in self._closed)

    def _need(self, max_length: int) -> int:
        """Return how many KV pages a session may come to hold: its tokens and one round beyond them."""
        return pages_for(max_length + self._settings.gamma + 1)

    # Between steps.

    def admit(self) -> list[TargetSession]:
        """Let sessions run while there is room; return those that start.

        The turn is theirs who have the fewest running, and of these the first that came. A session takes over indexed
        pages that hold a prefix of its prompt.
        """
        admitted = []
        while self.queue and len(self.running) < self._settings.max_sessions:
            running = Counter(session.emit for session in self.running.values())
            session = min(self.queue, key=lambda waiting: running[waiting.emit])  # the first of several
            if self.reserved + self._need(session.max_length) > self._kv.pool.num_pages:
                break
            self.queue.remove(session)
            self.reserved += self._need(session.max_length)
            self.running[session.id] = session
            session.epoch = self._first_epoch
            if session.prompt_logprobs is None:  # else the whole prompt is read
                self._kv.reuse_prefix(session.kv, session.tokens[:-1])
            session.stats.cached_tokens = session.kv.length
            session.stats.queue_seconds = time.monotonic() - session.opened_at
            self._counters["opened_sessions"] += 1
            admitted.append(session)
        return admitted

    def release_closed(self) -> None:
        """Release the pages of sessions that have ended. No step may be running."""
        for session in self._closed:
            self._kv.release(session.kv)
            self.reserved -= self._need(session.max_length)
        self._closed.clear()

    # Ending.

    def close(self, session: TargetSession) -> None:
        """End a running session. Its name is free at once; its pages are when no step runs."""
        self._closed.append(session)
        self._first_epoch = max(self._first_epoch, session.epoch + 1)
        del self.running[session.id]

    def drop_queued(self, name: str) -> None:
        """Forget the session of that name if it waits for room."""
        self.queue = deque(session for session in self.queue if session.id != name)
