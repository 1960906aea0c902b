"""The eleven generated tasks of RULER (arXiv 2404.06654, sections 3.1 to 3.3), with its prompts and parameters.

Words are compounds of two short ones instead of entries of a dictionary, which this package does not bring. As these
are longer, the example before the list of common words is always the one of RULER's short contexts.
"""

import math
import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from specahead.lab.evaluation.tasks.samples import Haystack, Sample, Task, hide

NOISE = Haystack(
    ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"]
)  # RULER's
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HOPS = 4
COMMON = 10  # words that appear often
_WORDS = """
amber ancient arctic azure bitter blind bold brave brief bright brisk broad bronze calm clever cold cosmic
crimson crisp crooked curious damp dark deep distant dusty eager early eastern elder empty faint fancy fierce flat
foggy fragile frosty gentle giant glad golden grand gray green grim happy hasty heavy hidden hollow humble icy idle
inner ivory jolly keen kind late lazy light little lively lonely long loud lucky lunar mellow merry mighty mild misty
modern muddy narrow neat nimble noble north odd old open outer pale patient plain polite proud pure purple quick quiet
rapid rare red rich rigid rough round royal rusty sandy scarlet secret sharp shy silent silver simple sleepy slow small
smooth soft solar solid sour

acorn anchor apple arrow badge barrel basin beacon bell berry blade bloom boat bottle branch bread brick
bridge brook brush bucket cabin candle canyon carpet castle cave chain chair cherry cliff clock cloud coast coin copper
coral corner cottage creek crown desert dish dock door dream drum eagle engine falcon feather fence field fire flag
flute forest fox garden gate glass glove grape hammer harbor harp hill hive horn horse island jacket jewel kettle key
kite ladder lake lamp lantern leaf lemon lion lock maple marble market meadow mill mirror moon mountain needle nest
oak ocean orchard otter owl paper pearl pebble pepper piano pillow pine planet pond prairie rabbit raven reef ring
river road robin
"""
_FIRST, _SECOND = (half.split() for half in _WORDS.split("\n\n"))


def words(rng: random.Random, count: int, joint: str = "-") -> list[str]:
    """Return distinct compounds. Raises ValueError where more are asked for than there are."""
    known = len(_FIRST) * len(_SECOND)
    if count > known:
        raise ValueError(f"this context needs {count} distinct words; there are {known}")
    drawn = (divmod(number, len(_SECOND)) for number in rng.sample(range(known), count))
    return [f"{_FIRST[first]}{joint}{_SECOND[second]}" for first, second in drawn]


def _numbers(rng: random.Random, count: int) -> list[str]:
    return [str(rng.randrange(1_000_000, 10_000_000)) for _ in range(count)]


def uuids(rng: random.Random, count: int) -> list[str]:
    """Return random UUIDs of version 4."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


_DRAWN: dict[str, Callable[[random.Random, int], list[str]]] = {"words": words, "numbers": _numbers, "uuids": uuids}


@dataclass(frozen=True)
class _Needles:
    """A needle in a haystack (RULER, section 3.1)."""

    haystack: Haystack | None
    """None: needles of other keys."""
    keys: int = 1
    values: int = 1
    """Values of each key."""
    asked: int = 1
    """Keys that the question names."""
    key_kind: str = "words"
    value_kind: str = "numbers"

    def make(self, rng: random.Random, size: int) -> Sample:
        others = 0 if self.haystack else size
        keys = _DRAWN[self.key_kind](rng, self.keys + others)
        drawn = _DRAWN[self.value_kind](rng, self.keys * self.values + others)
        single = self.asked * self.values == 1
        kind = self.value_kind[:-1] if single else self.value_kind
        pairs = [(keys[i // self.values], drawn[i]) for i in range(self.keys * self.values)]
        rest = zip(keys[self.keys :], drawn[len(pairs) :], strict=True)
        asked = rng.sample(keys[: self.keys], self.asked)
        rng.shuffle(pairs)
        pieces = self.haystack.cut(rng, size) if self.haystack else [self._say(*pair) for pair in rest]
        text, depths = hide(pieces, [self._say(*pair) for pair in pairs], rng)
        named = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        verb, some, every = ("is", "A", "What is") if single else ("are", "Some", "What are all")
        prompt = (
            f"{some} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. I will "
            f"quiz you about the {kind} afterwards.\n{text}\n{every} the special magic {kind} for {named} mentioned in "
            f"the provided text? The special magic {kind} for {named} mentioned in the provided text {verb}"
        )
        found = zip(pairs, depths, strict=True)
        kept = [(value, depth) for (key, value), depth in found if key in asked]
        return Sample(prompt, tuple(value for value, _ in kept), tuple(depth for _, depth in kept))

    def _say(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value) + ("\n" if self.haystack is None else " ")


def _variables(rng: random.Random, pieces: int, letters: int) -> tuple[str, list[str], tuple[float, ...]]:
    """Return a prompt without its answer, the variables of its chain, and their depths."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    value = str(rng.randrange(10_000, 100_000))
    said = [f"VAR {names[0]} = {value}\n", *(f"VAR {after} = VAR {name}\n" for name, after in pairwise(names))]
    text, depths = hide(NOISE.cut(rng, pieces), said, rng)
    prompt = (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\nQuestion: "
        f"Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) "
        f"of variable assignment in the text above, {HOPS + 1} variables are assigned the value {value}, they are:"
    )
    return prompt, names, depths


def _track_variables(rng: random.Random, size: int) -> Sample:
    """Section 3.2: one chain of variables among noise, behind a short example."""
    example, known, _ = _variables(rng, 5, 3)
    prompt, names, depths = _variables(rng, size, 5)
    return Sample(f"{example} {' '.join(known)}\n\n{prompt}", tuple(names), depths)


def _common_words(often: int, seldom: int, rng: random.Random, size: int) -> Sample:
    """Section 3.3: a list in which ten words appear often, behind a short example."""
    drawn = words(rng, 3 * COMMON + size, joint="")
    example = drawn[:COMMON]
    prompts = [_word_list(rng, example, 3, drawn[COMMON : 2 * COMMON], 1) + " " + _numbered(example)]
    common = drawn[2 * COMMON : 3 * COMMON]
    prompts.append(_word_list(rng, common, often, drawn[3 * COMMON :], seldom))
    return Sample("\n".join(prompts), tuple(common))


def _word_list(rng: random.Random, common: list[str], often: int, rare: list[str], seldom: int) -> str:
    shown = common * often + rare * seldom
    rng.shuffle(shown)
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{_numbered(shown)}\nQuestion: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    )


def _numbered(shown: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(shown, 1))


def _frequent_words(rng: random.Random, size: int) -> Sample:
    """Section 3.3: coded words whose frequencies follow a zeta distribution with α = 2; the first one is noise."""
    size += 30  # so that the four most frequent words differ in how often they appear
    zeta = math.pi**2 / 6
    counts = [int(size / (zeta * k * k)) for k in range(1, 1 + math.isqrt(int(size / zeta)))]
    coded = ["...."]
    while len(coded) < len(counts):
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        coded += [word] if word not in coded else []
    text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(text)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    return Sample(prompt, tuple(coded[1:4]))


def ruler_tasks(essay: Haystack, context: int) -> dict[str, Task]:
    """Return the tasks by RULER's names. essay: the haystack where RULER takes essays. context: tokens."""
    needles = {
        "niah_single_1": _Needles(NOISE),
        "niah_single_2": _Needles(essay),
        "niah_single_3": _Needles(essay, value_kind="uuids"),
        "niah_multikey_1": _Needles(essay, keys=4),
        "niah_multikey_2": _Needles(None),
        "niah_multikey_3": _Needles(None, key_kind="uuids", value_kind="uuids"),
        "niah_multivalue": _Needles(essay, values=4),
        "niah_multiquery": _Needles(essay, keys=4, asked=4),
    }
    return {name: Task(form.make, 128) for name, form in needles.items()} | {
        "vt": Task(_track_variables, 30),
        "cwe": Task(partial(_common_words, *((6, 1) if context < 4096 else (30, 3))), 120),
        "fwe": Task(_frequent_words, 50),
    }
