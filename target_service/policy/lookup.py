"""Prompt lookup: what followed the last tokens of a text when they occurred in it before.

Prompt lookup decoding (Saxena, 2023), the n-gram proposer of vLLM. It needs no model, and proposes well where a text
repeats itself: an agent copies from its context, code is edited, passages are quoted. Knows no sessions.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from target_service.policy.pace import Pause

SHORTEST = 3  # tokens that must have occurred before
LONGEST = 16  # tokens that are compared
PLACES = 16  # where the last tokens occurred that are compared, at most, the latest ones
_TOKEN_BITS = 21  # of a token id within the key of an n-gram, so that keys are int64
NEWEST = 1 / 16  # weight of the newest round of a session in the share of what is found that is right
NEWEST_TOKEN = 1 / 64  # weight of the newest token that follows a right one
PRIOR_ROUNDS = 16  # that what lookup alone would bring counts as before any round
LEAST_RIGHT = 0.06  # of what is found: below it the rows of a step that judge it cost more
MANY = 512  # tokens that are indexed at once by array operations, at least
MOST_AT_ONCE = 1 << 21  # and at most: places within the sorted array are smaller
_FIBONACCI = 0x9E3779B97F4A7C15  # a multiplier that mixes the upper bits
_KEY_MASK = (1 << SHORTEST * _TOKEN_BITS) - 1


class PromptLookup:
    """An index of the n-grams of one text that only grows: each token is indexed once, when a token follows it.

    A long text with which it begins is a sorted array of n-grams with the places behind them. The places behind all
    later occurrences of an n-gram of SHORTEST tokens form a chain from the latest one back, as in LZ77.
    """

    def __init__(self) -> None:
        self._first = np.empty(0, np.int64)  # hash of an n-gram and the place behind it, sorted
        self._begun = 0  # tokens that these are of
        self._latest: dict[int, int] = {}  # by key of an n-gram: the place behind its latest occurrence, after those
        self._before: list[int] = []  # by place after them: the place behind the occurrence before; 0: there is none
        self._key = 0  # of the tokens before the place `_indexed`

    @property
    def _indexed(self) -> int:
        """How many tokens are indexed."""
        return self._begun + len(self._before)

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Index the n-grams that end before place `end`, of a text that begins with that of the last call."""
        if not self._indexed and MANY <= end < MOST_AT_ONCE:
            self._begin(np.frombuffer(array("I", tokens[:end]), np.uint32).astype(np.int64))
        for place in range(self._indexed, end):
            previous = 0
            if place >= SHORTEST:
                previous = self._latest.get(self._key, 0)
                self._latest[self._key] = place
            self._before.append(previous)
            self._key = _with_token(self._key, tokens[place])

    def _begin(self, tokens: np.ndarray) -> None:
        """Index a long text at once. tokens: int64 [at least SHORTEST]."""
        keys = np.zeros(len(tokens) - SHORTEST + 1, np.int64)
        for offset in range(SHORTEST):
            keys = keys << _TOKEN_BITS | tokens[offset : offset + len(keys)]
        self._key, self._begun = int(keys[-1]), len(tokens)  # the last one ends where no token follows yet
        self._first = np.sort(_hashed(keys[:-1]) | np.arange(SHORTEST, len(tokens)))

    def _places(self, key: int) -> Iterator[int]:
        """Yield the places behind the occurrences of an n-gram, the latest first. After a long text's beginning these
        may be of another one whose hash is the same.
        """
        place = self._latest.get(key, 0)
        while place:
            yield place
            place = self._before[place - self._begun]
        hashed = _hashed_one(key)
        at = int(self._first.searchsorted(hashed + MOST_AT_ONCE)) - 1
        while at >= 0 and (there := int(self._first[at])) >= hashed:
            yield there - hashed
            at -= 1

    def propose(self, tokens: Sequence[int], count: int, stays: int | None = None) -> list[int]:
        """Return the tokens behind the latest of the longest matches of the text's last tokens: one for each matching
        token, `count` at most; [] if fewer than SHORTEST tokens match. A match that reaches into its own proposal goes
        round in a circle. stays: how many of the tokens will never change; None: all. Only these are indexed, since
        nothing is ever removed from the index.
        """
        self.extend(tokens, len(tokens) if stays is None else stays)
        place, length = self._best_match(tokens)
        proposed: list[int] = []
        for at in range(place, place + min(count, length)):
            proposed.append(tokens[at] if at < len(tokens) else proposed[at - len(tokens)])
        return proposed

    def _best_match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the place behind the match, and how many tokens match: 0 if the last ones have not occurred before."""
        best, longest = 0, 0
        if len(tokens) < SHORTEST:
            return best, longest
        key = self._key if len(tokens) == self._indexed else _key_of(tokens[-SHORTEST:])
        for place in islice(self._places(key), PLACES):
            length = _common_end(tokens, place)
            if length > longest:
                best, longest = place, length
            if longest == LONGEST:
                break
        return best, (longest if longest >= SHORTEST else 0)


def _hashed(keys: np.ndarray) -> np.ndarray:
    """Return hashes of n-grams, multiples of MOST_AT_ONCE, not negative: int64, of the shape of `keys`."""
    mixed = keys.astype(np.uint64) * np.uint64(_FIBONACCI)
    return (mixed >> np.uint64(2)).astype(np.int64) & -MOST_AT_ONCE


def _hashed_one(key: int) -> int:
    """Return the hash of one n-gram, without the overhead of arrays."""
    return (key * _FIBONACCI % (1 << 64) >> 2) & -MOST_AT_ONCE


def _with_token(key: int, token: int) -> int:
    """Return the key of an n-gram that this token ends, by the key of the one before it."""
    return (key << _TOKEN_BITS | token) & _KEY_MASK


def _key_of(tokens: Sequence[int]) -> int:
    return reduce(_with_token, tokens, 0)


def _common_end(tokens: Sequence[int], place: int) -> int:
    """Return how many tokens before `place` are the text's last ones, up to LONGEST."""
    length, end = 0, len(tokens)
    while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class Judged(NamedTuple):
    """What a round says of the tokens that lookup had found for it, whether they were proposed or not."""

    right: int
    """How many of them, from the first one on, were committed."""
    wrong: bool
    """Whether another token was committed in place of the next one."""
    more: int
    """How many were found behind the right ones if the round ended with these; 0 if one was wrong."""


@dataclass
class LookedUp:
    """What rounds bring for which prompt lookup alone proposes, by what it found for rounds of any kind."""

    tokens: float = 1.0
    """Tokens of such a round, the target's own included: a mean in which older rounds fade."""
    goes_on: float = 0.5
    """How often a right token is followed by another right one."""
    rounds: int = PRIOR_ROUNDS
    """How many rounds these figures are of, those that were assumed included."""

    def note(self, judged: Judged, newest: float) -> None:
        """Take note of a round. What it did not reach counts as it is expected. newest: the least weight of a round."""
        for goes_on in [True] * (judged.right - 1) + [False] * (judged.wrong and judged.right > 0):
            self.goes_on += NEWEST_TOKEN * (goes_on - self.goes_on)
        unreached = sum(self.goes_on**n for n in range(1, judged.more + 1))
        self.rounds += 1
        self.tokens += max(newest, 1 / self.rounds) * (1 + judged.right + unreached - self.tokens)

    def approach(self, other: "LookedUp", share: float) -> None:
        """Move the figures towards those of another by a share of the distance."""
        self.tokens += share * (other.tokens - self.tokens)
        self.goes_on += share * (other.goes_on - self.goes_on)


@dataclass
class FirstGuess:
    """What prompt lookup proposes where there is a draft model, too.

    While the draft proposes, lookup comes first only for a text that copies at length: where as many of its last tokens
    have occurred before as are proposed at once. While the plan proposes nothing, all that lookup finds is proposed.
    What it finds is compared with what is committed in any case, so that the policy knows what rounds without a draft
    would bring.
    """

    most: int
    """Tokens that it proposes, at most."""
    tokens: list[int] = field(default_factory=list)
    """What it proposes for the next round."""
    found: list[int] = field(default_factory=list)
    """What lookup has found."""
    place: int = -1
    """The number of the text's tokens when that was found; -1: it was judged already."""
    copies: bool = False
    """Whether so much was found as for a text that copies at length."""
    right_share: float = 0.5
    """Share of the found tokens that were right, in the last rounds."""
    pause: Pause = field(default_factory=Pause)
    """Follows a guess before the draft that was mostly wrong."""

    def judge(self, place: int, committed: Sequence[int]) -> Judged | None:
        """Return what a round says of what was found that has committed these tokens from `place` on; None: nothing,
        since it was found elsewhere.
        """
        if place != self.place:
            return None
        self.place = -1
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.found, committed, strict=False)))
        compared = min(len(self.found), len(committed))
        if compared:
            self.right_share += NEWEST * (right / compared - self.right_share)
        wrong = right < compared
        return Judged(right, wrong, 0 if wrong else len(self.found) - right)

    def note(self, proposed: int, accepted: int, committed: int) -> None:
        """Take note of a round that accepted `accepted` tokens of a guess before the draft; `committed` tokens are
        committed now.
        """
        if 2 * accepted >= proposed:
            self.pause.paid()
        else:
            self.pause.begin(committed)

    def guess(self, lookup: PromptLookup, text: Sequence[int], room: int, alone: bool) -> None:
        """Guess what the next round of a text proposes, up to `room` tokens. alone: whether nobody else proposes."""
        count, self.place = min(self.most, room), len(text)
        self.found = lookup.propose(text, count) if count > 0 else []
        self.copies = len(self.found) >= count > 0
        first = self.copies and not self.pause.lasts(len(text))
        self.tokens = self.found if first or (alone and self.right_share >= LEAST_RIGHT) else []

    def forget(self) -> None:
        """Propose nothing in the next round, since what was found belongs to another place."""
        self.tokens, self.found, self.place, self.copies = [], [], -1, False
