"""Rounds are judged together as each is by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.engine.sampling.distributions import USE_ACCEPT, USE_TARGET, Sampling, uniforms
from specahead.engine.sampling.judging import Drafted, judge_by_rules
from specahead.wire import messages as m
from tests.unit.distributions import probs_of_row
from tests.unit.fake_models import GREEDY, VOCAB, judge_rounds


def judged_by_hand(logits: Tensor, item: Drafted) -> tuple[int, int]:
    """One round, token by token in float64: each position with its own uniforms, whatever round it falls in."""
    for i, row in enumerate(logits.numpy()):
        if item.sampling.greedy:
            following = int(row.argmax())
            if i == len(item.tokens) or item.tokens[i] != following:
                return i, following
            continue
        weights = probs_of_row(row, item.sampling)
        if i < len(item.tokens):
            token, draft = item.tokens[i], {item.tokens[i]: 1.0}
            if item.supports:
                ids, probs = item.supports[i].ids.tolist(), item.supports[i].probs.tolist()
                draft = dict(zip(ids, probs, strict=True))
            u = uniforms(item.sampling.seed, item.base + i, 1, USE_ACCEPT)[0]
            if u * draft[token] < weights.get(token, 0.0):
                continue
            weights = {t: max(p - draft.get(t, 0.0), 0.0) for t, p in weights.items()}
        threshold = uniforms(item.sampling.seed, item.base + i, 1, USE_TARGET)[0] * sum(weights.values())
        for token in sorted(weights):
            threshold -= weights[token]
            if threshold < 0:
                return i, token
    raise AssertionError("a round always has a next token")


def test_rounds_are_judged_as_each_by_hand() -> None:
    """Greedy and sampled ones together, of different lengths, with and without distributions."""
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    rounds, all_logits = [], []
    for i in range(300):
        count = i % 4
        logits = 1.5 * torch.randn(count + 1, VOCAB, generator=generator)
        likely = logits.topk(4).indices[:count].tolist()
        tokens = [int(rng.choice(row)) if rng.random() < 0.4 else row[0] for row in likely]
        sampling = GREEDY if i % 3 == 0 else Sampling(0.5, 0.9, seed=i)
        supports = []
        if not sampling.greedy and rng.random() < 0.7:
            others = [[token, (token + 1) % VOCAB, (token + 5) % VOCAB] for token in tokens]
            supports = [m.Support(np.array(ids), np.array([0.5, 0.25, 0.25], np.float32)) for ids in others]
        all_logits.append(logits)
        rounds.append(Drafted(tokens, supports, sampling, base=i))
    outcomes = judge_rounds(all_logits, rounds)
    assert outcomes == [judged_by_hand(*item) for item in zip(all_logits, rounds, strict=True)]
    assert {accepted for accepted, _ in outcomes} == {0, 1, 2, 3}


def test_tokens_whatever_is_drafted_are_those_of_plain_decoding() -> None:
    """Any proposals, in any rounds, sampled and greedy side by side, give what the target draws alone."""
    generator = torch.Generator().manual_seed(1)
    rng = np.random.default_rng(1)
    samplings = [Sampling(0.7, 0.9, seed=3), Sampling(1.3, 1.0, seed=4), GREEDY]
    all_logits = 1.5 * torch.randn(len(samplings), 60, VOCAB, generator=generator)
    plain = [[own(all_logits[row], sampling, at) for at in range(60)] for row, sampling in enumerate(samplings)]
    given: list[list[int]] = [[] for _ in samplings]
    kept = 0
    while min(map(len, given)) < 50:
        rounds, rows = [], []
        for row, sampling in enumerate(samplings):
            base, count = len(given[row]), int(rng.integers(0, 5))
            tokens = [plain[row][base + i] if rng.random() < 0.6 else int(rng.integers(VOCAB)) for i in range(count)]
            supports = [m.Support(np.array([t, (t + 1) % VOCAB]), np.array([0.5, 0.5], np.float32)) for t in tokens]
            rounds.append(Drafted(tokens, [] if sampling.greedy else supports, sampling, base))
            rows.append(all_logits[row, base : base + count + 1])
        for tokens, item, (accepted, following) in zip(given, rounds, judge_rounds(rows, rounds, True), strict=True):
            tokens += [*item.tokens[:accepted], following]
            del tokens[50:]
            kept += accepted
    assert given == [tokens[:50] for tokens in plain]
    assert kept > 50


def own(logits: Tensor, sampling: Sampling, at: int) -> int:
    """What the target decodes at a position of which nothing is drafted."""
    return judge_rounds([logits[at : at + 1]], [Drafted([], [], sampling, at)], draws_own=True)[0][1]


# Levels of verification


def test_a_screened_token_is_drawn_from_the_likeliest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of the verdict comes with what it was drawn from."""
    monkeypatch.setattr("specahead.engine.sampling.judging.WIDE_SUPPORT", 4)
    logits = torch.randn(200, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    likely = logits.topk(5).indices
    rounds = [
        Drafted(row[:2, 2 * (i % 3)].tolist(), [], Sampling(1.5, 1.0, seed=i), base=i, screens=True)
        for i, row in enumerate(likely)
    ]
    verdicts = judge_by_rules(logits, rounds)
    assert {verdict.verdict[0] for verdict in verdicts} == {0, 1, 2}
    for i, (item, verdict) in enumerate(zip(rounds, verdicts, strict=True)):
        accepted, following = verdict.verdict
        assert len(verdict.supports) == accepted + 1
        for place, (token, support) in enumerate(
            zip([*item.tokens[:accepted], following], verdict.supports, strict=True)
        ):
            assert token in support.ids.tolist() == likely[i, place, :4].tolist()
            wanted = (logits[i, place, likely[i, place, :4]] / 1.5).softmax(0)
            np.testing.assert_allclose(support.probs, wanted.numpy(), rtol=1e-5)
