"""Verdicts by chance, for models of random weights: what they say means nothing, so acceptance is imposed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from specahead.engine.sampling.distributions import USE_ACCEPT, USE_ALTERNATIVE, USE_SCREEN_ACCEPT, uniforms
from specahead.engine.steps.device_chain import NO_ALTERNATIVE, Imposed
from specahead.engine.steps.requests import DraftedTokens
from target_service.planning import VerifyRound

_AT_ONCE = 256  # positions whose numbers are drawn together
ALTERNATIVES_RIGHT = 0.7  # of the acceptance, how often a second choice is right; the bundled pair has that at 0.8
CONFIRMATION = 0.989  # of the bundled pair
FORESIGHT = 0.85  # share of the positions at which a draft's next choice is the token that the target adds


@dataclass(frozen=True)
class ImposedVerdicts:
    """A judge (target_service.hooks) whose verdicts depend on a session's seed and position alone."""

    acceptance: float
    """Probability that a drafted token is kept."""

    confirmation: float = 1.0
    """Probability that a token is kept which sparse attention accepted and a dense pass confirms."""

    alternatives: float = -1.0
    """Probability that an alternative is right where the drafted token is not; negative: a share of acceptance."""

    def __call__(self, item: VerifyRound, vocab_size: int) -> Imposed:
        """Return how many tokens a round keeps, the token that follows them, and an alternative that was taken."""
        if item.imposed is None:
            item.imposed = self._judge(item, vocab_size)
        return item.imposed

    def _judge(self, item: VerifyRound, vocab_size: int) -> Imposed:
        session, held, count = item.session, item.held, len(item.proposed)
        base = len(session.tokens) - held
        if not held + count:
            return 0, imposed_token(base, vocab_size), NO_ALTERNATIVE
        seed, use = session.asked.sampling.seed, USE_ACCEPT if not item.screens else USE_SCREEN_ACCEPT
        rates = [self.confirmation] * held + [self.acceptance] * count
        rejected = (i for i, rate in enumerate(rates) if _uniform(seed, base + i, use) >= rate)
        kept = next(rejected, held + count)
        beside = kept < item.input.alternatives
        if beside and _uniform(seed, base + kept, USE_ALTERNATIVE) < self.alternatives_share:
            return kept + 1, imposed_token(base + kept + 1, vocab_size), imposed_token(base + kept, vocab_size)
        return kept, imposed_token(base + kept, vocab_size), NO_ALTERNATIVE

    @property
    def alternatives_share(self) -> float:
        """Probability that an alternative is right where the drafted token is not."""
        return self.alternatives if self.alternatives >= 0 else ALTERNATIVES_RIGHT * self.acceptance


def _uniform(seed: int, position: int, use: int) -> float:
    """Return the number of engine.sampling.distributions.uniforms at a position."""
    return _some_uniforms(seed, position // _AT_ONCE, use)[position % _AT_ONCE]


@lru_cache(maxsize=1024)  # what a benchmark does for each round would else count as the host's part of it
def _some_uniforms(seed: int, part: int, use: int) -> list[float]:
    numbers: list[float] = uniforms(seed, part * _AT_ONCE, _AT_ONCE, use).tolist()
    return numbers


def imposed_token(position: Any, vocab_size: int) -> Any:
    """Return the token that the target adds at a position, or at each position of an array."""
    return position * 7919 % vocab_size


def foreseeing(drafted: list[DraftedTokens], starts: list[int], vocab: int) -> Iterable[DraftedTokens]:
    """Yield drafted tokens so that the draft's next choice is the imposed token at FORESIGHT of the positions.

    drafted: all outcomes of a step, each with equally many tokens. starts: the position of each one's first token.
    Which positions are foreseen depends on the position alone.
    """
    tokens = np.array([each.tokens for each in drafted])
    positions = np.array(starts)[:, None] + np.arange(tokens.shape[1])
    known = positions * 2654435761 % 2**32 < FORESIGHT * 2**32
    imposed = imposed_token(positions, vocab)
    tokens[:, -1] = np.where(known[:, -1], imposed[:, -1], tokens[:, -1])
    if any(each.alternatives is None for each in drafted):
        yield from (replace(each, tokens=own) for each, own in zip(drafted, tokens.tolist(), strict=True))
        return
    alternatives = np.stack([each.alternatives for each in drafted if each.alternatives is not None])
    alternatives[:, :, 0] = tokens
    alternatives[known, 1] = imposed[known]
    for each, own, others in zip(drafted, tokens.tolist(), alternatives, strict=True):
        yield DraftedTokens(own, each.ids, each.probs, others)
