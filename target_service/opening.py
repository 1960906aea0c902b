"""Checks the requests of sessions, and makes the sessions."""

from collections.abc import Callable

from specahead.config import TargetSettings
from specahead.config.speculation import READ_AT_ONCE
from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.sampling.grammars import Grammars, GrammarState
from specahead.engine.sampling.logit_rules import rules_of
from specahead.sparsity.reader import Reader
from specahead.wire.errors import InvalidArgument
from specahead.wire.messages import Exactness, Open, ServedEvent
from target_service.policy.lookup import FirstGuess, PromptLookup
from target_service.screening import Screening, screening_reader
from target_service.self_drafting import SelfDrafting
from target_service.session import Asked, Reading, TargetSession
from target_service.target import Target


class SessionMaker:
    """Checks requests, and makes their sessions."""

    def __init__(
        self,
        target: Target,
        grammars: Grammars | None = None,
        drafting: SelfDrafting | None = None,
        prefers_exact: Callable[[], bool] = lambda: False,
    ) -> None:
        """grammars: compiles the grammars of sessions; None: no session may have one. drafting: how sessions draft for
        themselves; None: none does. prefers_exact: whether approximate requests are to be served exactly at present,
        where the settings allow it.
        """
        self._prefers_exact, self._grammars, self._drafting = prefers_exact, grammars, drafting
        self._runner, self._plan, self._settings = target.runner, target.plan, target.settings
        self._hooks = target.hooks

    def check(self, request: Open) -> None:
        """Raise InvalidArgument for a request that can never run."""
        name, length, vocab_size = request.session, request.prompt_tokens + request.max_tokens, self._runner.vocab_size
        settings, pages = self._settings, self._runner.kv.pool.num_pages
        if not 1 <= request.prompt_tokens <= len(request.tokens):
            raise InvalidArgument(f"{request.prompt_tokens} prompt tokens among {len(request.tokens)} tokens")
        if max(request.tokens) >= vocab_size:
            raise InvalidArgument(f"a prompt token lies outside the vocabulary of {vocab_size}")
        if not all(token < vocab_size for token in request.sampling.logit_bias):
            raise InvalidArgument(f"logit_bias: a token lies outside the vocabulary of {vocab_size}")
        if request.wants_logprobs and self._hooks.imposes_verdicts:
            raise InvalidArgument("logprobs: a benchmark imposes the verdicts here, so tokens have none")
        if request.max_tokens < 1 or len(request.tokens) >= length:
            raise InvalidArgument(f"max_tokens {request.max_tokens} leaves nothing to generate")
        if length > settings.max_context:
            raise InvalidArgument(
                f"{request.prompt_tokens} prompt tokens and max_tokens {request.max_tokens} exceed the context of "
                f"{settings.max_context} tokens"
            )
        need = pages_of_round(length, settings)
        if need > pages:
            raise InvalidArgument(f"{length} tokens need {need} KV pages of {PAGE_SIZE}, the target has {pages}")
        if request.grammar and (self._grammars is None or self._hooks.imposes_verdicts):
            raise InvalidArgument(f"session {name}: this target follows no grammars")

    def make(self, request: Open, emit: Callable[[ServedEvent], None], now: float) -> TargetSession:
        """Return the session of a request that was checked, which is queued `now`; its grammar begins to compile."""
        settings, screening = self._settings, None
        exact = request.exactness is Exactness.EXACT or (settings.may_serve_exactly and self._prefers_exact())
        if exact and settings.most_held > 0:
            screening = Screening(settings.most_held, settings.widest_round, len(request.tokens))
        guesses_first = exact and settings.chosen.lookup
        looks_up = guesses_first or settings.draft in ("lookup", "auto")
        session = TargetSession(
            asked=self._asked(request, emit),
            tokens=list(request.tokens),
            queued_at=now,
            prompt_logprobs=[] if request.wants_logprobs and request.wants_prompt_logprobs else None,
            reading=Reading(self._reader(exact, screening is not None)),
            screening=screening,
            lookup=PromptLookup() if looks_up else None,
            first_guess=FirstGuess(READ_AT_ONCE - 1) if guesses_first else None,
            deterministic=self._runner.deterministic,
        )
        if session.lookup is not None:
            session.lookup.extend(session.tokens, len(session.tokens))  # beside the step that runs
        session.kv.dense = session.reading.is_dense
        if screening is not None:
            session.kv.settled = screening.settled
        if self._drafting is not None and (session.reading.is_dense or session.reading.is_announced):
            session.reading.memory = self._drafting.new_memory()
            session.kv.drafts = True
        return session

    def _asked(self, request: Open, emit: Callable[[ServedEvent], None]) -> Asked:
        grammar = self._grammar(request)
        stops = [token for token in request.stop_token_ids if token < self._runner.vocab_size]  # others never come
        rules = rules_of(request.sampling, request.prompt_tokens, stops)
        return Asked(
            id=request.session,
            emit=emit,
            prompt_tokens=request.prompt_tokens,
            max_length=request.prompt_tokens + request.max_tokens,
            sampling=request.sampling,
            stop_token_ids=frozenset(stops),
            rules=rules if grammar is None else (grammar, *rules),
            grammar=grammar,
            logprobs=request.alternatives if request.wants_logprobs else None,
            caller=request.caller,
            client=request.client,
            choice=request.choice,
            resumed=request.resumed,
        )

    def _grammar(self, request: Open) -> GrammarState | None:
        if not request.grammar or self._grammars is None:
            return None
        return self._grammars.start(request.grammar, request.tokens, request.prompt_tokens)

    def _reader(self, exact: bool, screened: bool) -> Reader | None:
        """Return how a session reads; None: everything. screened: whether sparse attention screens its proposals."""
        if screened:
            return screening_reader(self._plan, self._settings.self_read_share)
        if exact:
            return None
        return Reader(self._plan, is_announced=not self._runner.leaves_states)  # a head announces nothing


def pages_of_round(tokens: int, settings: TargetSettings) -> int:
    """Return the KV pages of `tokens` tokens and the next round."""
    return pages_for(tokens + settings.most_drafted + 1)
