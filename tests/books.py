"""The texts that tests run on: four books in the public domain (tests/data/README.md), and random tokens."""

import lzma
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

DATA = Path(__file__).resolve().parent / "data"


def read_books() -> list[str]:
    """Return the four books, ordered by their file's name. The shortest has 175,000 characters."""
    return [lzma.decompress(file.read_bytes()).decode() for file in sorted(DATA.glob("*.txt.xz"))]


def read_passages(
    books: list[str], tokenizer: Any, lengths: Sequence[int], seed: int, characters: int = 0
) -> list[list[int]]:
    """Return passages of these lengths in tokens, from the books by turns, each from a random place of its book.

    characters: of a book that are tokenized for each; 0: ten for each token.
    """
    chosen, passages = Random(seed), list[list[int]]()
    for index, length in enumerate(lengths):
        book, taken = books[index % len(books)], characters or 10 * length
        start = chosen.randrange(len(book) - taken)
        passages.append(tokenizer.encode(book[start : start + taken])[:length])
    assert [len(passage) for passage in passages] == list(lengths)
    return passages


def spread(count: int, shortest: int, longest: int) -> list[int]:
    """Return lengths from the shortest to the longest, evenly on a logarithmic scale."""
    return [round(shortest * (longest / shortest) ** (index / (count - 1))) for index in range(count)]


def random_tokens(count: int, seed: int, vocab: int = 4096) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
