"""A target whose weights and KV are held in 8 bits: its greedy tokens with drafting are those without."""

from typing import Any

import pytest

from tests.books import read_passages
from tests.e2e.test_bfloat16 import run
from tests.stack import start_services

TARGET = ("-m", "target_service", "--quantization", "fp8", "--kv-cache-dtype", "fp8")


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    return read_passages(books, tokenizer, (20, 150, 400, 800), 11, 30_000)


def test_greedy_tokens_do_not_depend_on_drafting(prompts: list[list[int]]) -> None:
    """One at a time, so that both have prompts in the same parts and steps of few rows."""
    plain = run(start_services(target_command=TARGET, drafted=False), prompts, 1)
    services = start_services(target_command=(*TARGET, "--speculation", '{"gamma": 4, "hold": 8}'))
    assert run(services, prompts, 1) == plain
