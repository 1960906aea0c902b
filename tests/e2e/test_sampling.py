"""Sampled `exact` output has the target's distribution; as many draws from the draft's are found out."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch

from specahead.engine.loading.model import load_module
from specahead.models import DRAFT
from tests.client import generate
from tests.stack import Stack
from tests.unit.distributions import chi_square

DRAWS, AT_ONCE = 300, 32
PROMPT = "The old man looked at the"
TEMPERATURE, TOP_P = 0.7, 0.8


@torch.inference_mode()
def _distributions(model: Any, prompt: list[int], places: int) -> list[dict[int, float]]:
    """A model's distribution of each of the first tokens, by plain enumeration of all prefixes."""
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    marginals: list[dict[int, float]] = []
    for _ in range(places):
        marginal: Counter[int] = Counter()
        longer: dict[tuple[int, ...], float] = {}
        keys = list(prefixes)
        for start in range(0, len(keys), 512):
            chunk = keys[start : start + 512]
            logits = model(torch.tensor([prompt + list(key) for key in chunk]), logits_to_keep=1).logits[:, -1]
            for key, row in zip(chunk, (logits / TEMPERATURE).softmax(-1), strict=True):
                ordered, ids = row.sort(descending=True)
                count = int((ordered.double().cumsum(0) - ordered < TOP_P).sum())
                kept = ordered[:count] / ordered[:count].sum()
                for token, p in zip(ids[:count].tolist(), kept.tolist(), strict=True):
                    marginal[token] += prefixes[key] * p
                    if prefixes[key] * p > 1e-7:  # what is cut off here is far below what so many draws can see
                        longer[(*key, token)] = prefixes[key] * p
        marginals.append(marginal)
        prefixes = longer
    return marginals


def test_sampled_exact_has_the_targets_distribution(stack: Stack, target_module: Any, tokenizer: Any) -> None:
    """300 draws; as many from the draft's distribution, as a rule that accepts everything would give, are found out."""
    prompt, stub = tokenizer.encode(PROMPT), stack.stub()

    def run(seed: int) -> list[int]:
        result = generate(stub, prompt, max_tokens=4, temperature=TEMPERATURE, top_p=TOP_P, seed=seed, ignore_eos=True)
        assert result.speculation.drafted >= 2, "the second and third token go through the acceptance rule"
        return result.tokens[:3]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        samples = list(pool.map(run, range(DRAWS)))
    draft = load_module(str(DRAFT), torch.float32, "cpu", "sdpa")
    expected, drafted = _distributions(target_module, prompt, 3), _distributions(draft, prompt, 2)
    assert all(sum(marginal.values()) == pytest.approx(1, abs=1e-3) for marginal in expected)
    p_values = [chi_square(Counter(s[i] for s in samples), expected[i]) for i in range(3)]
    assert min(p_values) > 1e-3, p_values
    wrong = [Counter(Random(1).choices(list(p), list(p.values()), k=DRAWS)) for p in drafted]
    p_values = [chi_square(*each) for each in zip(wrong, expected[:2], strict=True)]
    assert max(p_values) < 1e-6, p_values
