"""Rounds are judged together as each is by hand."""

import numpy as np
import torch
from torch import Tensor

from engine.judging import Drafted
from engine.sampling import USE_ACCEPT, USE_TARGET, Sampling, uniforms
from tests.unit.fake_models import GREEDY, VOCAB, judge_rounds
from tests.unit.world import target_probs
from wire import messages as m


def judged_by_hand(logits: Tensor, item: Drafted) -> tuple[int, int]:
    """One round, token by token in float64: each position with its own uniforms, whatever round it falls in."""
    for i, row in enumerate(logits.numpy()):
        if item.sampling.greedy:
            following = int(row.argmax())
            if i == len(item.tokens) or item.tokens[i] != following:
                return i, following
            continue
        weights = target_probs(row, item.sampling)
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
