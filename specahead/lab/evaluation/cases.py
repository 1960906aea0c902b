"""Cases of an evaluation: token sequences, where sparse verification starts, and which tokens are asked for.

Perplexity cases are plain text; recall and copy cases hide something in a text and ask for it at the end.
"""

import itertools
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from specahead.sparsity.plan import Plan

WARM_UP = 16  # tokens of text before the question that are verified sparsely, too


@dataclass(frozen=True)
class Case:
    """A text, and an answer in it if it asks for something."""

    name: str
    tokens: list[int]
    start: int
    """Tokens before it are read densely, the others in rounds."""
    asked: tuple[int, int] | None = None
    """First token of the answer and the token behind its last; recalled if each one is the likeliest. None: none."""


def read_texts(sources: list[str]) -> dict[str, str]:
    """Return texts by name, from files or, where no file of a name exists, from a Hugging Face data set.

    A data set is ID, or ID:CONFIG:SPLIT:COLUMN with any of the last three empty; each row of its first 32 is a text.
    """
    texts: dict[str, str] = {}
    for source in sources:
        if Path(source).is_file():
            texts[Path(source).stem] = Path(source).read_text(encoding="utf-8")
        else:
            texts |= _read_data_set(source)
    return texts


def held_out_files(folder: str, plan: Plan) -> list[str]:
    """Return the .txt files of a folder that a plan was not calibrated on. Raises ValueError if there is none."""
    held_in = set(plan.provenance.get("files", ()))
    files = [str(file) for file in sorted(Path(folder).glob("*.txt")) if file.name not in held_in]
    if not files:
        raise ValueError(f"{folder}: no .txt file that the plan was not calibrated on")
    return files


def _read_data_set(source: str) -> dict[str, str]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{source}: no such file; to read it as a Hugging Face data set, install the package `datasets`"
        ) from None
    name, config, split, column = [*source.split(":"), "", "", ""][:4]
    rows = datasets.load_dataset(name, config or None, split=split or "test", streaming=True)
    return {f"{name}-{i}": row[column or "text"] for i, row in zip(range(32), rows, strict=False)}


def tokens_of(text: str, tokenizer: Any, length: int, at: float) -> list[int]:
    """Return `length` tokens of a text, from about the share `at` of it on. Raises ValueError for a short text."""
    start = int(len(text) * at)
    tokens: list[int] = tokenizer.encode(text[start : start + 10 * length], add_special_tokens=False)[:length]
    if len(tokens) < length:
        raise ValueError(f"a text has {len(tokens)} tokens after {at:.0%} of it; {length} are needed")
    return tokens


def perplexity_cases(
    texts: dict[str, str], tokenizer: Any, context: int, prefilled: int, passages: int = 1
) -> list[Case]:
    """Return evenly spread passages of each text: `prefilled` tokens are read densely, the others scored."""
    return [
        Case(f"{name}@{i}", tokens_of(text, tokenizer, context, 0.02 + 0.8 * i / passages), prefilled)
        for name, text in texts.items()
        for i in range(passages)
    ]


NAMES = ["Marlow", "Priscilla", "Hawkins", "Ottilie", "Barnabas", "Cordelia", "Ferdinand", "Rosamund"]


Words = tuple[list[str], str, str]  # sentences to hide at random depths, a question, and its answer


def _pass_key(rng: random.Random) -> Words:
    key = str(rng.randrange(10_000, 100_000))
    said = f"The pass key is {key}. Remember it. {key} is the pass key."
    return [said], "What is the pass key? The pass key is", f" {key}."


def _named_keys(rng: random.Random) -> Words:
    keys = {name: str(rng.randrange(10_000, 100_000)) for name in rng.sample(NAMES, 4)}
    said = [f"The pass key of {name} is {key}. Remember it." for name, key in keys.items()]
    name = rng.choice(list(keys))
    return said, f"What is the pass key of {name}? The pass key of {name} is", f" {keys[name]}."


def _pairs(rng: random.Random) -> Words:
    pairs = {name: str(rng.randrange(10_000, 100_000)) for name in rng.sample(NAMES, 6)}
    name = rng.choice(list(pairs))
    return [f"{name} = {value}" for name, value in pairs.items()], f"{name} =", f" {pairs[name]}"


def _copied_code(rng: random.Random) -> Words:
    names = [f"{rng.choice(NAMES).lower()}_{rng.randrange(100, 1000)}" for _ in range(4)]
    numbers = [rng.randrange(10_000, 100_000) for _ in range(3)]
    body = (
        f"({names[1]}, {names[2]}):\n    {names[3]} = {names[1]} * {numbers[0]} + {numbers[1]}\n"
        f"    return {names[3]} - {names[2]} * {numbers[2]}"
    )
    return [f"def {names[0]}{body}"], f"def {names[0]}", body


RECALL = {"pass-key": _pass_key, "named-keys": _named_keys, "pairs": _pairs}


class _Hidden(NamedTuple):
    """What is hidden, asked and answered, in tokens."""

    said: list[list[int]]
    question: list[int]
    answer: list[int]


def recall_cases(kinds: list[str], texts: dict[str, str], tokenizer: Any, context: int, count: int) -> list[Case]:
    """Return `count` cases of each kind, hidden in passages of `context` tokens at random depths."""
    unknown = set(kinds) - set(RECALL)
    if unknown:
        raise ValueError(f"recall of {sorted(unknown)}; known are {sorted(RECALL)}")
    cases = []
    for kind, number in itertools.product(kinds, range(count)):
        name, rng = f"{kind}-{number}", random.Random(f"{kind}-{number}")
        cases.append(_hide(name, _tokens(RECALL[kind](rng), tokenizer), texts, tokenizer, context, rng))
    return cases


def copy_cases(texts: dict[str, str], tokenizer: Any, context: int, count: int) -> list[Case]:
    """Return cases that repeat code, and cases that repeat spans of random tokens, in turn."""
    cases = []
    for i in range(count):
        rng = random.Random(f"copy-{i}")
        hidden = _tokens(_copied_code(rng), tokenizer) if i % 2 else _copied_tokens(rng, len(tokenizer))
        cases.append(_hide(f"copy-{'code' if i % 2 else 'tokens'}-{i}", hidden, texts, tokenizer, context, rng))
    return cases


def _tokens(words: Words, tokenizer: Any) -> _Hidden:
    said, question, answer = words
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return _Hidden([encode(f"\n\n{each}\n\n") for each in said], encode(f"\n\n{question}"), encode(answer))


def _copied_tokens(rng: random.Random, vocab: int) -> _Hidden:
    span = [rng.randrange(min(300, vocab // 2), vocab) for _ in range(64)]
    return _Hidden([span], span[:24], span[24:])


def _hide(name: str, hidden: _Hidden, texts: dict[str, str], tokenizer: Any, context: int, rng: random.Random) -> Case:
    """Hide something in one of the texts, and ask for it at the end."""
    said, question, answer = hidden
    room = context - sum(map(len, (*said, question, answer)))
    body = tokens_of(texts[rng.choice(sorted(texts))], tokenizer, room, 0.02 + 0.7 * rng.random())
    depths = sorted((int((0.02 + 0.93 * rng.random()) * room) for _ in said), reverse=True)
    for depth, part in zip(depths, said, strict=True):
        body[depth:depth] = part
    tokens = body + question + answer
    return Case(name, tokens, len(body) - WARM_UP, (len(tokens) - len(answer), len(tokens)))
