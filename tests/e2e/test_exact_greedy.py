"""Greedy `exact` output is the target's own, token for token."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from protos import inference_pb2
from specahead.models import DRAFT, TARGET
from tests.books import read_passages, spread
from tests.client import APPROXIMATE, EXACT, generate, metric
from tests.plans import sparse_plan_file
from tests.stack import Stack

NEW_TOKENS, PROMPTS, AT_ONCE = 48, 12, 6


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    """Prompts of 16 to 1,500 tokens from all books."""
    return read_passages(books, tokenizer, spread(PROMPTS, 16, 1500), 7, 60_000)


Proof = Callable[[list[int], list[int]], bool]


@pytest.fixture(scope="module")
def greedy(target_module: Any) -> Proof:
    """Return a function that says whether tokens are what transformers generates in float32 after a prompt.

    Each token must be the likeliest by transformers' logits after the prompt and the tokens before it. They are then,
    by induction, those of its greedy `generate`. One pass shows it for all tokens.
    """
    proven: dict[tuple[int, ...], list[int]] = {}

    def is_greedy(prompt: list[int], tokens: list[int]) -> bool:
        known = proven.setdefault(tuple(prompt), [])
        if not known:
            with torch.inference_mode():
                logits = target_module(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits
            if logits[0].argmax(-1).tolist() == tokens:
                known.extend(tokens)
        return len(tokens) == NEW_TOKENS and tokens == known

    return is_greedy


def check_steps_chained_to_rounds(stack: Stack, prompts: list[list[int]]) -> None:
    """Steps of the target begin behind rounds of the draft in its process, and the reverse. The draft's second choice
    is right now and then.
    """
    floors = {"steps_chained_to_rounds": 10, "rounds_chained_to_steps": 10, "accepted_alternatives": 3}
    for name, least in floors.items():
        assert metric(stack.http, "service_events_total", name=name) > least


def check_whole_budget(stack: Stack, prompts: list[list[int]]) -> None:
    """With a budget of all blocks `approximate` equals `exact`. Copied text was looked up before a draft was asked."""
    assert metric(stack.http, "service_events_total", name="lookup_accepted_tokens") > 30
    stub, fields = stack.stub(), {"max_tokens": 16, "ignore_eos": True}

    def run(prompt: list[int]) -> list[list[int]]:
        result = generate(stub, prompt, exactness=APPROXIMATE, **fields)
        assert result.speculation.kv_read_fraction == 1
        assert result.speculation.announced_bytes == 0  # there is nothing to choose
        assert result.speculation.rounds > 0
        return [result.tokens, generate(stub, prompt, exactness=EXACT, **fields).tokens]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for sparse, exact in pool.map(run, prompts[-2:]):
            assert sparse == exact


def copied() -> list[int]:
    """Return a prompt of 90 tokens three times over; the target continues the repetition."""
    chosen = random.Random(1)
    return [chosen.randrange(4, 4096) for _ in range(90)] * 3


# Each setting gets prompts of several books, and a further check of the launch.
@pytest.mark.parametrize(
    ("speculation", "flags", "every", "also"),
    [
        ({"gamma": 4, "branches": 8, "lookup": True}, "--budget 1.0", slice(3, 9, 2), check_whole_budget),
        ({"gamma": 4}, "--placement together", slice(1, None, 5), check_steps_chained_to_rounds),
    ],
    ids=["branches", "together"],
)
def test_greedy_exact_equals_transformers(
    speculation: dict[str, Any],
    flags: str,
    every: slice,
    also: Callable[[Stack, list[list[int]]], None],
    launch: Callable[..., Stack],
    prompts: list[list[int]],
    greedy: Proof,
) -> None:
    stack = launch("--plan", sparse_plan_file(), "--speculation", json.dumps(speculation), *flags.split())
    assert ("draft" in stack.services) == ("together" not in flags)
    drafted, accepted = check(stack, prompts[every] + [copied()] * ("lookup" in speculation), greedy)
    also(stack, prompts[every])
    assert stack.stop() == 0
    assert accepted > 0.4 * drafted, "fewer drafted tokens were accepted than these books give"


@pytest.mark.parametrize(
    ("draft", "speculation", "counter"),
    [
        ("", {"gamma": 4, "branches": 3, "hold": 12}, ""),
        ("lookup", {"gamma": 4, "hold": 12}, "lookup_accepted_tokens"),
        ("self", {"gamma": 6}, "self_accepted_tokens"),
    ],
    ids=["held", "lookup", "self"],
)
def test_greedy_exact_with_held_tokens_and_without_a_draft_equals_transformers(
    draft: str,
    speculation: dict[str, Any],
    counter: str,
    launch: Callable[..., Stack],
    prompts: list[list[int]],
    greedy: Proof,
) -> None:
    """A draft whose tokens are held back; a target that proposes by prompt lookup and holds them; one that drafts for
    itself. counter: what the target counts for tokens that it proposed itself.
    """
    models = ("--target", str(TARGET), "--draft", draft or str(DRAFT))
    stack = launch(*models, "--speculation", json.dumps(speculation), altered='{"self_read_share": 0.25}')
    drafted, accepted = check(stack, prompts[::5] if draft else prompts[2::3], greedy)
    assert accepted > max(20, (0.4 if draft else 0.2) * drafted), "fewer were accepted than these books give"
    assert metric(stack.http, "spec_decode_num_accepted_tokens_total") == accepted
    if counter:
        assert metric(stack.http, "service_events_total", name=counter) == accepted
    if draft != "self":
        check_confirmed(stack, 30 if draft else 80)


def check_confirmed(stack: Stack, least: int) -> None:
    """Sparse attention screened more than `least` tokens, of which more than a third were confirmed."""
    names = "confirmed_tokens", "screened_tokens"
    confirmed, screened = (metric(stack.http, "service_events_total", name=name) for name in names)
    assert confirmed > 0.35 * screened > 0.35 * least, "fewer were confirmed than these books give"


def check(stack: Stack, prompts: list[list[int]], greedy: Proof) -> tuple[int, int]:
    """Compare the tokens of all prompts. Return how many tokens were drafted and how many were accepted."""
    stub = stack.stub()

    def run(prompt: list[int]) -> tuple[list[int], inference_pb2.SpeculationSummary]:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True
        )
        responses = list(stub.Generate(request))
        return [t for response in responses for t in response.token_ids], responses[-1].speculation

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(run, prompts))
    different = [i for i, (tokens, _) in enumerate(results) if not greedy(prompts[i], tokens)]
    assert not different, f"prompts {different} differ from transformers"
    return sum(summary.drafted for _, summary in results), sum(summary.accepted for _, summary in results)
