"""A task makes samples of any size; here they are made as long as a context allows. Knows no task."""

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

DEPTHS = 40  # at which needles may lie, evenly spread (RULER)
_AIM, _ENOUGH = 0.99, 0.96  # shares of the room: what a sample is made for, and what ends the search


@dataclass(frozen=True)
class Sample:
    """One prompt and what a right answer contains."""

    prompt: str
    references: tuple[str, ...]
    """Strings that a right answer contains."""
    depths: tuple[float, ...] = ()
    """The share of the haystack before each needle, in the order of the text."""


@dataclass(frozen=True)
class Task:
    """How samples of one kind are made and judged."""

    make: Callable[[random.Random, int], Sample]
    """Makes the sample of a random generator, in a size that its length grows with (needles, sentences, words)."""
    answer_tokens: int
    """Room for the answer."""
    any_reference: bool = False
    """Whether one reference suffices; otherwise the score is the share of references in the answer."""
    most: int = 1 << 24
    """The largest size."""
    completes: bool = False
    """Whether the answer goes on with the text of the prompt, so that it is never asked as a chat."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the answer to a chat may call, as OpenAI's protocol has them."""

    def score(self, answer: str, sample: Sample) -> float:
        """Return RULER's score of an answer, from 0 to 1: references are sought as they are, ignoring case."""
        found = [reference.lower() in answer.lower() for reference in sample.references]
        return float(any(found)) if self.any_reference else sum(found) / len(found)


def fit(task: Task, seed: str, room: int, count: Callable[[str], int]) -> tuple[Sample, int]:
    """Return the sample of a seed whose prompt nearly fills `room` tokens, and its number of tokens.

    count: gives the number of tokens of a text. Raises ValueError if the smallest sample is too long.
    """

    def made(size: int) -> tuple[Sample, int]:
        sample = task.make(random.Random(seed), size)
        return sample, count(sample.prompt)

    best = made(1)
    least = best[1]
    if least > room:
        raise ValueError(f"{seed}: the shortest prompt has {least} tokens, but the context leaves {room} for it")
    fits, too_long, size = 1, task.most + 1, min(task.most, 64)
    while fits < size < too_long and best[1] < _ENOUGH * room:
        sample, tokens = made(size)
        if tokens <= room:
            fits, best = size, (sample, tokens)
        else:
            too_long = size
        wanted = 1 + (size - 1) * (_AIM * room - least) / max(1, tokens - least)  # length grows linearly with size
        size = min(max(int(wanted), fits + 1), too_long - 1)
    return best


class Haystack:
    """A text in pieces, mostly sentences, between which needles can lie."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    @classmethod
    def of_text(cls, text: str) -> "Haystack":
        """Return a text cut behind sentences and lines, at least every 40 words. Raises ValueError for no words."""
        pieces, words = [], []
        for word in re.findall(r"\S+\s*", text.strip() + "\n"):
            words.append(word)
            if len(words) == 40 or re.search(r"[.!?][\"'”’)]*\s|\n", word):
                pieces.append("".join(words))
                words = []
        if not pieces:
            raise ValueError("a haystack needs a text with words in it")
        return cls(pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def cut(self, rng: random.Random, size: int) -> list[str]:
        """Return `size` pieces from a random one on; behind the last one the text begins again."""
        start = rng.randrange(len(self._pieces))
        return [self._pieces[(start + i) % len(self._pieces)] for i in range(size)]


def hide(pieces: list[str], needles: list[str], rng: random.Random) -> tuple[str, tuple[float, ...]]:
    """Return the pieces as one text with each needle at a random depth, in the order given, and the true depths."""
    ends = [0, *accumulate(map(len, pieces))]
    wanted = sorted(rng.sample(range(DEPTHS), len(needles)))
    places = [bisect_left(ends, ends[-1] * depth / (DEPTHS - 1)) for depth in wanted]
    parts, last = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [*pieces[last:place], needle]
        last = place
    return "".join([*parts, *pieces[last:]]), tuple(ends[place] / ends[-1] for place in places)
