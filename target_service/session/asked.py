"""What a session asked for when it was opened."""

from collections.abc import Callable
from dataclasses import dataclass

from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.grammars import GrammarState
from specahead.engine.sampling.logit_rules import LogitRule
from specahead.wire.messages import ServedEvent


@dataclass(frozen=True)
class Asked:
    """A session's request, as the target needs it."""

    id: str
    """The session's name."""
    emit: Callable[[ServedEvent], None]
    """Where its commits go; it also tells which stream opened it."""
    prompt_tokens: int
    """How many of its first tokens are the prompt."""
    max_length: int
    """Tokens of prompt and answer together, at most."""
    sampling: Sampling
    """How its tokens are drawn."""
    stop_token_ids: frozenset[int]
    """Tokens that end its text."""
    rules: tuple[LogitRule, ...]
    """What changes its logits; its grammar is one of them."""
    grammar: GrammarState | None
    """The grammar that its text must follow."""
    logprobs: int | None
    """How many alternatives to tell with the log probability of each token; None: tell none."""
    caller: str
    """The name of the key that its request came with."""
    client: str
    """The client with whose other sessions it shares places."""
    choice: int
    """Which of its request's choices this is."""
    resumed: bool
    """Whether it was accepted before, by another orchestrator or target."""
