"""Penalties, biases, cuts and log probabilities over real services and gateway, against the model's own logits."""

from typing import Any

import pytest
import torch
from openai import OpenAI

from specahead.engine.sampling.distributions import Sampling
from tests.unit.distributions import changed_row

PROMPT = "The old man looked at the sea and the old man looked at the"
STOP = 198


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def complete(client: OpenAI, prompt: list[int], **fields: Any) -> Any:
    return client.completions.create(
        model="tiny-target", prompt=prompt, temperature=0, extra_body=fields | {"return_speculation": True}
    )


def test_greedy_with_rules_is_plain_decoding_with_them(client: OpenAI, target_module: Any, tokenizer: Any) -> None:
    """Most tokens are proposed by the draft, which knows the rules as well."""
    prompt = tokenizer.encode(PROMPT)
    rules = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.3, "min_tokens": 30}
    biases = dict.fromkeys(tokenizer.encode(" whale ship"), 4.0)
    fields = {"max_tokens": 48, "logprobs": 0, "stop_token_ids": [STOP], "ignore_eos": True}
    answer = complete(client, prompt, logit_bias=biases, **rules, **fields)
    tokens = list(prompt)
    sampling = Sampling(0.0, logit_bias=biases, **rules)
    while len(tokens) < len(prompt) + 48 and tokens[-1] != STOP:
        logits = logits_of(target_module, tokens)[-1].numpy()
        tokens.append(int(changed_row(logits, tokens, len(prompt), sampling, [STOP]).argmax()))
    assert answer.choices[0].logprobs.tokens == [tokenizer.decode([token]) for token in tokens[len(prompt) :]]
    assert answer.speculation["accepted"] > answer.speculation["drafted"] / 5


def test_log_probabilities_are_the_models(client: OpenAI, target_module: Any, tokenizer: Any) -> None:
    """They are told of a prompt and of what follows it, as evaluation harnesses ask for them."""
    prompt = tokenizer.encode(PROMPT * 30)[:600]
    answer = complete(client, prompt, logprobs=2, echo=True, max_tokens=6)
    told = answer.choices[0].logprobs
    continuation = told.tokens[len(prompt) :]
    tokens = [*prompt, *(t for text in continuation for t in tokenizer.encode(text, add_special_tokens=False))]
    assert len(told.tokens) == len(told.token_logprobs) == len(tokens) == len(prompt) + 6
    expected = logits_of(target_module, tokens).log_softmax(-1)
    assert told.token_logprobs[0] is None
    for at in range(1, len(tokens)):
        assert told.token_logprobs[at] == pytest.approx(float(expected[at - 1, tokens[at]]), abs=2e-3)
        best = expected[at - 1].topk(2).values.tolist()
        assert sorted(told.top_logprobs[at].values(), reverse=True)[:2] == pytest.approx(best, abs=2e-3)
    only = complete(client, prompt, logprobs=2, echo=True, max_tokens=0)
    assert only.choices[0].logprobs.token_logprobs == pytest.approx(told.token_logprobs[: len(prompt)], abs=2e-3)
    assert only.usage.completion_tokens == 0


def test_a_cut_to_one_token_is_greedy(client: OpenAI, tokenizer: Any) -> None:
    """top_k and min_p reach the target, and the draft, whose proposals are accepted."""
    prompt = tokenizer.encode(PROMPT)
    greedy = complete(client, prompt, max_tokens=32, ignore_eos=True)
    for cut in ({"top_k": 1}, {"min_p": 1.0}):
        answer = complete(client, prompt, max_tokens=32, ignore_eos=True, **cut, **{"temperature": 1.5})
        assert answer.choices[0].text == greedy.choices[0].text
        assert answer.speculation["accepted"] == greedy.speculation["accepted"]
