"""What a tenth of the blocks is enough for. That all of them are `exact` again is in test_exact_greedy.py."""

import random
from typing import Any

import pytest

from tests.client import APPROXIMATE, generate
from tests.stack import Stack


@pytest.mark.parametrize("case", range(3))
def test_recall_at_a_tenth_of_the_blocks(case: int, stack: Stack, books: list[str], tokenizer: Any) -> None:
    """A fact hidden at a random depth of a book of 3,000 tokens and asked for at the end."""
    chosen = random.Random(case)
    key = str(chosen.randrange(10_000, 99_999))
    text = books[case % len(books)]
    start = chosen.randrange(len(text) - 50_000)
    book = tokenizer.encode(text[start : start + 50_000])[:2950]
    at = int(chosen.random() * 0.9 * len(book))
    fact = tokenizer.encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")
    question = tokenizer.encode("\n\nWhat is the pass key? The pass key is")
    prompt = book[:at] + fact + book[at:] + question
    for _ in range(5):  # on a busy machine a draft may be late, and what is decoded without it is read wholly
        result = generate(stack.stub(), prompt, max_tokens=12, exactness=APPROXIMATE)
        assert key in result.text.replace(" ", "")
        if not result.speculation.plain_rounds:
            break
    assert result.speculation.kv_read_fraction <= 0.12
