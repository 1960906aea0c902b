"""`approximate` against `exact`, and what a tenth of the blocks is enough for."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.client import APPROXIMATE, EXACT, generate
from tests.stack import Stack


def test_a_budget_of_all_blocks_equals_exact(launch: Callable[..., Stack], books: list[str], tokenizer: Any) -> None:
    stack = launch("--budget", "1.0")
    stub = stack.stub()
    prompts = [tokenizer.encode(book[5000:25_000])[: 100 + 950 * i] for i, book in enumerate(books)]

    def run(case: tuple[list[int], int]) -> list[int]:
        prompt, exactness = case
        result = generate(stub, prompt, max_tokens=48, exactness=exactness, ignore_eos=True)
        assert result.speculation.kv_read_fraction == 1
        assert (result.speculation.announced_bytes > 0) == (exactness == APPROXIMATE)
        return result.tokens

    with ThreadPoolExecutor(8) as pool:
        sparse = list(pool.map(run, [(prompt, APPROXIMATE) for prompt in prompts]))
        dense = list(pool.map(run, [(prompt, EXACT) for prompt in prompts]))
    stack.stop()
    assert sparse == dense


@pytest.mark.parametrize("case", range(4))
def test_recall_at_a_tenth_of_the_blocks(case: int, stack: Stack, books: list[str], tokenizer: Any) -> None:
    """A fact hidden at a random depth of a book of 4,000 tokens and asked for at the end."""
    chosen = random.Random(case)
    key = str(chosen.randrange(10_000, 99_999))
    text = books[case % len(books)]
    start = chosen.randrange(len(text) - 50_000)
    book = tokenizer.encode(text[start : start + 50_000])[:3950]
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
