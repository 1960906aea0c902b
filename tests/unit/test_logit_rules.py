"""Penalties, biases, masks and cuts, against the distribution worked out token by token in float64."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted, cut_logits, cuts_of, judge_by_rules
from specahead.engine.sampling.logit_rules import TokenCounts, rules_of
from tests.unit.distributions import changed_row, probs_of_row

STOPS = [3, 7]
SAMPLINGS = {
    "plain": Sampling(0.8, 0.9, seed=1),
    "top_k": Sampling(0.8, 1.0, seed=1, top_k=5),
    "top_k of 1": Sampling(1.3, 1.0, seed=1, top_k=1),
    "top_k beyond the vocabulary": Sampling(0.8, 1.0, seed=1, top_k=500),
    "top_k and top_p": Sampling(0.8, 0.7, seed=1, top_k=6),
    "min_p": Sampling(1.5, 1.0, seed=1, min_p=0.2),
    "min_p of 1": Sampling(1.5, 1.0, seed=1, min_p=1.0),
    "min_p, top_k and top_p": Sampling(1.5, 0.8, seed=1, top_k=9, min_p=0.05),
    "presence": Sampling(1.0, 1.0, seed=1, presence_penalty=1.5),
    "frequency": Sampling(1.0, 1.0, seed=1, frequency_penalty=-0.7),
    "repetition": Sampling(1.0, 1.0, seed=1, repetition_penalty=1.7),
    "bias": Sampling(1.0, 1.0, seed=1, logit_bias={2: -100.0, 5: 3.5}),
    "min_tokens": Sampling(1.0, 1.0, seed=1, min_tokens=6),
    "all": Sampling(0.7, 0.9, 1, 10, 0.02, 0.5, 0.3, 1.2, {1: 2.0, 9: -4.0}, 7),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_each_position_of_a_round_has_the_distribution_worked_out_by_hand(sampling: Sampling) -> None:
    """With the same rules over several rounds, after which some proposed tokens are taken back."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 12, 9).tolist()
    prompt = 5
    rules = rules_of(sampling, prompt, STOPS)
    for _ in range(6):
        proposed = rng.integers(0, 12, int(rng.integers(0, 5))).tolist()
        logits = torch.from_numpy(rng.normal(size=(len(proposed) + 1, 24)).astype(np.float32)) * 3
        got = logits.clone()
        for rule in rules:
            rule.apply(got, tokens, proposed)
        cuts = cuts_of([Drafted(proposed, [], sampling, len(tokens))])
        if cuts:
            limits = torch.tensor([sampling.top_k]), torch.tensor([sampling.min_p])
            got = cut_logits(got[None], torch.tensor([sampling.temperature]), *limits, cuts)[0]
        for i, row in enumerate(got):
            expected = changed_row(logits[i].numpy(), tokens + proposed[:i], prompt, sampling, STOPS)
            by_hand = probs_of_row(expected, sampling)
            by_engine = probs_of_row(row.numpy(), Sampling(sampling.temperature, sampling.top_p))
            for token in range(len(row)):
                expected_share = by_hand.get(token, 0.0)
                assert by_engine.get(token, 0.0) == pytest.approx(expected_share, rel=1e-5, abs=1e-12)
        tokens += [*proposed[: int(rng.integers(0, 3))], int(rng.integers(0, 12))]


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_counts_follow_committed_tokens_back_and_on(seed: int) -> None:
    """Some that were not confirmed are taken back, up to as many as a pass can judge."""
    rng, prompt = random.Random(seed), 40
    counts, committed = TokenCounts(prompt), [rng.randrange(9) for _ in range(prompt)]
    confirmed = prompt
    for _ in range(20):
        if rng.random() < 0.5:
            del committed[rng.randint(confirmed, len(committed)) :]
        if rng.random() < 0.3:
            confirmed = len(committed)
        committed += [rng.randrange(9) for _ in range(rng.randint(0, 31 - (len(committed) - confirmed)))]
        rows = counts.update(committed, 9, torch.device("cpu"))
        for row, tokens in zip(rows, (committed[:prompt], committed[prompt:]), strict=True):
            assert row.tolist() == [tokens.count(token) for token in range(9)]


class Forbid:
    """Masks tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def apply(self, logits: torch.Tensor, committed: object, proposed: object) -> None:
        logits[:, self._tokens] = -torch.inf


def test_tokens_that_end_a_session_may_come_before_min_tokens_where_nothing_else_may() -> None:
    sampling = Sampling(0.0, min_tokens=3)
    for forbidden, token in ([0, 1, 2, 4, 5, 6, 8, 9], 3), ([0, 1, 2, 4, 5, 6, 9], 8):
        rules = Forbid(forbidden), *rules_of(sampling, 1, STOPS)
        (judged,) = judge_by_rules(torch.zeros(1, 1, 10), [Drafted([], [], sampling, 1, rules, [5])])
        assert (judged.verdict, judged.finite) == ((0, token), True)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    """Whatever temperature, cuts and biases do to the choice."""
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    sampling = Sampling(0.0, logit_bias={best[1]: -100.0})
    rules = rules_of(sampling, 2, [])
    drafted = Drafted([best[0], 2], [], sampling, 2, rules, [1, 1], logprobs=3)
    (judged,) = judge_by_rules(logits[None], [drafted])
    expected = logits.double().log_softmax(-1)
    accepted, following = judged.verdict
    tokens = [*drafted.tokens[:accepted], following]
    assert len(judged.logprobs) == len(tokens) > 1
    for row, token, found in zip(expected, tokens, judged.logprobs, strict=False):
        order = row.argsort(descending=True)[:3]
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert found.top_ids == order.tolist()
        assert found.top_logprobs == pytest.approx(row[order].tolist(), abs=1e-5)
