"""`approximate` requests: what they recall from a tenth of the blocks, and which texts they read wholly.

test_exact_greedy.py shows that an `approximate` request which reads all blocks equals `exact`.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.altered import PATIENT
from tests.books import read_passages, spread
from tests.client import APPROXIMATE, EXACT, generate, metric, read_by_rounds, service_state
from tests.leads import LARGEST_LEAD, changed_tokens
from tests.stack import Stack

AUDITED = ("tokens", "total_variation", "same_greedy")  # metrics


@pytest.fixture(scope="module")
def served(launch: Callable[..., Stack]) -> Stack:
    """A launch with the bundled plan unchanged, as users have it; a quarter of the sparse rounds is audited."""
    speculation = '{"gamma": 4, "audit_share": 0.25, "max_divergence": 1.0}'
    return launch("--speculation", speculation, altered=PATIENT)


@pytest.mark.parametrize("case", range(2))
def test_recall_at_a_tenth_of_the_blocks(case: int, stack: Stack, books: list[str], tokenizer: Any) -> None:
    """A fact is hidden at a random depth of 3,000 tokens of a book, and the end of the prompt asks for it."""
    chosen = random.Random(case)
    key = str(chosen.randrange(10_000, 99_999))
    text = books[case % len(books)]
    start = chosen.randrange(len(text) - 50_000)
    book = tokenizer.encode(text[start : start + 50_000])[:2950]
    at = int(chosen.random() * 0.9 * len(book))
    fact = tokenizer.encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")
    question = tokenizer.encode("\n\nWhat is the pass key? The pass key is")
    prompt = book[:at] + fact + book[at:] + question
    for _ in range(5):  # on a busy machine a draft may be late, and a round without it reads everything
        result = generate(stack.stub(), prompt, max_tokens=12, exactness=APPROXIMATE)
        assert key in result.text.replace(" ", "")
        if result.speculation.plain_rounds <= 1:  # the first token comes with the prompt
            break
    assert result.speculation.kv_read_fraction <= 0.12


def prompts_of(books: list[str], tokenizer: Any, count: int, shortest: int, longest: int) -> list[list[int]]:
    return read_passages(books, tokenizer, spread(count, shortest, longest), count)


def test_short_texts_keep_every_token_that_dense_attention_is_sure_of(
    served: Stack, books: list[str], tokenizer: Any
) -> None:
    prompts = prompts_of(books, tokenizer, 32, 10, 1000)
    changed = changed_tokens(served.http, "tiny-target", prompts, 12)
    assert [token for token in changed if token.lead > LARGEST_LEAD] == []


def test_texts_that_are_read_sparsely_keep_them_too(served: Stack, books: list[str], tokenizer: Any) -> None:
    prompts = prompts_of(books, tokenizer, 4, 1100, 2400)
    changed = changed_tokens(served.http, "tiny-target", prompts, 32)
    assert changed  # else nothing was read sparsely
    assert [token for token in changed if token.lead > LARGEST_LEAD] == []


def test_what_a_text_of_a_thousand_tokens_reads(served: Stack, books: list[str], tokenizer: Any) -> None:
    short, long = prompts_of(books, tokenizer, 2, 900, 1500)
    wholly, sparsely = (generate(served.stub(), p, max_tokens=24, exactness=APPROXIMATE) for p in (short, long))
    assert (wholly.speculation.kv_read_fraction, wholly.speculation.announced_bytes) == (1, 0)
    assert read_by_rounds(sparsely.speculation) < 0.8 and sparsely.speculation.announced_bytes > 0


def test_answers_and_metrics_tell_of_audits(served: Stack, books: list[str], tokenizer: Any) -> None:
    """Sparse rounds of a text that is read sparsely are audited; exact requests never are."""
    _, prompt = prompts_of(books, tokenizer, 2, 1100, 1200)
    before = {name: metric(served.http, f"audited_{name}_total") for name in AUDITED}
    exact, approximate = (
        generate(served.stub(), prompt, max_tokens=48, exactness=each) for each in (EXACT, APPROXIMATE)
    )
    none, found = exact.speculation, approximate.speculation
    assert (none.audited_tokens, none.total_variation, none.same_greedy) == (0, 0, 1)
    assert found.audited_tokens >= 3
    assert 1e-4 < found.total_variation < 0.5 and found.kl_divergence > 1e-7 and 0.3 < found.same_greedy <= 1
    assert found.rounds_made_exact == 0

    tokens, variation, same = (metric(served.http, f"audited_{name}_total") - before[name] for name in AUDITED)
    assert tokens == found.audited_tokens
    assert variation / tokens == pytest.approx(found.total_variation)
    assert same / tokens == pytest.approx(found.same_greedy)
    assert metric(served.http, "service_events_total", name="audited_rounds") >= 2
    assert service_state(served.http, "target", "audit_max_divergence") == 1
    assert service_state(served.http, "target", "audit_total_variation") > 0
