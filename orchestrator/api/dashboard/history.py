"""The last hour as sums over a few seconds each, whether or not somebody looks. It knows neither sessions nor texts.

Latencies are counted in buckets, eight to a doubling, so that quantiles of any span can be read from sums of samples.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import dropwhile

from specahead.wire.messages import Commit

SAMPLE_SECONDS = 5
MOST_SAMPLES = 3600 // SAMPLE_SECONDS
BUCKETS = 8  # of latencies, to a doubling


@dataclass
class Sample:
    """What happened within SAMPLE_SECONDS. Latencies are in seconds, counted by bucket."""

    time: int
    """When it began, in seconds since 1970."""
    running: int
    """Requests that were open at once, at most."""
    tokens: int = 0
    rounds_by_proposer: list[int] = field(default_factory=lambda: [0] * 4)
    """Rounds by who proposed (specahead.wire.messages.Proposer)."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """Accepted tokens by their place in the proposal."""
    kv_read: int = 0
    """In (layer, KV head, token) triples."""
    kv_total: int = 0
    """What dense rounds would have read."""
    kv_fetched: int = 0
    """Of what was read: what came from host memory."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was there."""
    first: Counter[int] = field(default_factory=Counter)
    """From a request to its first token."""
    between: Counter[int] = field(default_factory=Counter)
    """From one token to the next."""
    turn: Counter[int] = field(default_factory=Counter)
    """From a request to the end of its answer."""


SAMPLE_FIELDS = tuple(each.name for each in fields(Sample))


class History:
    """The samples of the last hour. Seconds in which nothing happened have none."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._running = 0
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def open(self) -> None:
        """Count a request that has come."""
        self._running += 1
        sample = self._present()
        sample.running = max(sample.running, self._running)

    def round(self, commit: Commit, prompt_tokens: int, seconds: float, first: bool) -> None:
        """Count the rounds of a commit. seconds: since the last one, or the request. first: whether there was none."""
        sample, figures, tokens = self._present(), commit.figures, len(commit.tokens)
        sample.tokens += tokens
        for drafted, accepted in commit.rounds:
            sample.rounds_by_proposer[commit.proposer if drafted else 0] += 1
            sample.drafted += drafted
            sample.accepted += accepted
            sample.accepted_at += [0] * (drafted - len(sample.accepted_at))
            for place in range(accepted):
                sample.accepted_at[place] += 1
        sample.kv_read += figures.kv_tokens_read
        sample.kv_total += figures.kv_tokens_total
        sample.kv_fetched += figures.kv_tokens_fetched
        if first:
            sample.prompt_tokens += prompt_tokens
            sample.cached_tokens += commit.cached_tokens
            sample.first[_bucket(seconds)] += 1
        elif tokens:
            sample.between[_bucket(seconds / tokens)] += tokens

    def end(self, seconds: float | None) -> None:
        """Count a request that has ended. seconds: until its whole answer was there; None if it broke off."""
        self._running -= 1
        if seconds is not None:
            self._present().turn[_bucket(seconds)] += 1

    def since(self, when: int) -> list[Sample]:
        """Return the samples of the last hour that began at `when` or later, the oldest first."""
        earliest = max(when, self._clock() - SAMPLE_SECONDS * MOST_SAMPLES)
        return list(dropwhile(lambda sample: sample.time < earliest, self._samples))

    def _present(self) -> Sample:
        """Return the present sample."""
        began = int(self._clock() // SAMPLE_SECONDS) * SAMPLE_SECONDS
        if not self._samples or self._samples[-1].time < began:
            self._samples.append(Sample(began, self._running))
        return self._samples[-1]


def _bucket(seconds: float) -> int:
    return round(BUCKETS * math.log2(max(seconds, 1e-6)))
