"""Greedy `exact` output is the target's own, token for token."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import NotFoundError, OpenAI

from engine.loading.model import load_model
from models import DRAFT, TARGET
from protos import inference_pb2
from tests.client import metric
from tests.stack import Stack

NEW_TOKENS, PROMPTS, AT_ONCE = 64, 40, 8


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    """Prompts of 16 to 6,000 tokens from all books, their lengths spread evenly on a logarithmic scale."""
    chosen = random.Random(7)
    lengths = [round(16 * (6000 / 16) ** (i / (PROMPTS - 1))) for i in range(PROMPTS)]
    prompts = []
    for i, length in enumerate(lengths):
        book = books[i % len(books)]
        start = chosen.randrange(len(book) - 60_000)
        prompts.append(tokenizer.encode(book[start : start + 60_000])[:length])
    assert [len(prompt) for prompt in prompts] == lengths
    return prompts


Proof = Callable[[list[int], list[int]], bool]


@pytest.fixture(scope="module")
def greedy() -> Proof:
    """Whether tokens are what transformers generates in float32 after a prompt.

    Each must be the likeliest by transformers' logits after the prompt and the tokens before it, which makes them, one
    after the other, those of its greedy `generate`; one pass says it of all.
    """
    model: Any = load_model(str(TARGET), torch.float32, "cpu", "sdpa")
    proven: dict[tuple[int, ...], list[int]] = {}

    def is_greedy(prompt: list[int], tokens: list[int]) -> bool:
        known = proven.setdefault(tuple(prompt), [])
        if not known:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits
            if logits[0].argmax(-1).tolist() == tokens:
                known.extend(tokens)
        return len(tokens) == NEW_TOKENS and tokens == known

    return is_greedy


# Every second prompt with the setting that is served most, every third and every fifth with others. share: of the
# drafted tokens at least so many are accepted; measured 0.75, 0.50 and 0.41, and below 0.33; a draft
# on its own gives 0.41 with the last fifth as well.
@pytest.mark.parametrize(
    ("flags", "share", "every"),
    [
        ("--gamma 1", 0.7, slice(0, None, 3)),
        ("--gamma 4 --draft-branches 8", 0.45, slice(1, None, 2)),
        ("--gamma 4 --draft-in-target", 0.38, slice(2, None, 5)),
    ],
)
def test_greedy_exact_equals_transformers(
    flags: str, share: float, every: slice, launch: Callable[..., Stack], prompts: list[list[int]], greedy: Proof
) -> None:
    stack = launch(*flags.split())
    assert ("draft" in stack.services) == ("--draft-in-target" not in flags)
    drafted, accepted = check(stack, "", prompts[every], greedy)
    if "--draft-in-target" in flags:
        assert metric(stack.http, "service_events_total", name="steps_behind_rounds") > 10
    stack.stop()
    assert accepted > share * drafted, "fewer drafted tokens were accepted than these books give"


MODELS = f"""
models:
  - target: {TARGET}
    draft: {DRAFT}
    served_model_name: pair
    gamma: 8
    draft_branches: 3
    draft_waves: 1
    confirm_every: 12
  - target: {TARGET}
    draft: ngram
    served_model_name: ngram
  - target: {TARGET}
    draft: self
    self_from: 0
    served_model_name: self
    gamma: 6
"""


def test_greedy_exact_of_several_models_in_one_launch_equals_transformers(
    launch: Callable[..., Stack], tmp_path: Path, prompts: list[list[int]], greedy: Proof
) -> None:
    """One has a draft and three levels. Of the others, which propose by prompt lookup or draft for themselves, there is
    one service.
    """
    file = tmp_path / "models.yaml"
    file.write_text(MODELS)
    stack = launch("--config", str(file))
    assert list(stack.services) == ["target@pair", "draft@pair", "target@ngram", "target@self"]
    drafted, accepted = check(stack, "pair", prompts[1::5], greedy)
    assert accepted > 0.17 * drafted, "fewer drafted tokens were accepted than these books give"
    assert metric(stack.http, "spec_decode_num_accepted_tokens_total", model_name="pair") == accepted
    names = "confirmed_tokens", "screened_tokens"
    confirmed, screened = (
        metric(stack.http, "service_events_total", service="target@pair", name=name) for name in names
    )
    assert confirmed > 0.5 * screened > 100, "fewer were confirmed than these books give"
    for model, share in (("ngram", 0.4), ("self", 0.35)):  # when self drafts is up to how busy the machine is
        assert metric(stack.http, "spec_decode_num_draft_tokens_total", model_name=model) == 0
        drafted, accepted = check(stack, model, prompts[2::5], greedy)
        assert accepted > share * drafted > 80, "fewer were accepted than these books give"  # ngram: some 57 %
        events = {"service": f"target@{model}", "name": f"{model}_accepted_tokens"}
        assert metric(stack.http, "service_events_total", **events) == accepted
        assert metric(stack.http, "spec_decode_num_accepted_tokens_total", model_name=model) == accepted
    with OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["pair", "ngram", "self"]
        with pytest.raises(NotFoundError, match="The model `another` does not exist"):
            client.completions.create(model="another", prompt="a")


def check(stack: Stack, model: str, prompts: list[list[int]], greedy: Proof) -> tuple[int, int]:
    """Compare the tokens of all prompts; return how many were drafted and how many accepted."""
    stub = stack.stub()

    def run(prompt: list[int]) -> tuple[list[int], inference_pb2.SpeculationSummary]:
        request = inference_pb2.GenerateRequest(
            model=model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            max_tokens=NEW_TOKENS,
            temperature=0,
            ignore_eos=True,
        )
        responses = list(stub.Generate(request))
        return [t for response in responses for t in response.token_ids], responses[-1].speculation

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(run, prompts))
    different = [i for i, (tokens, _) in enumerate(results) if not greedy(prompts[i], tokens)]
    assert not different, f"prompts {different} differ from transformers"
    return sum(summary.drafted for _, summary in results), sum(summary.accepted for _, summary in results)
