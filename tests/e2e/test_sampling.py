"""Sampled `exact` output has the target's distribution; a broken acceptance rule is found out."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from specahead.engine.loading.model import load_module
from specahead.models import TARGET
from tests.client import generate
from tests.stack import Services, Stack, start_gateway, start_services

DRAWS, DRAWS_OF_BROKEN, AT_ONCE = 700, 400, 32
PROMPT = "The old man looked at the"
TEMPERATURE, TOP_P = 0.7, 0.8

# A target whose rule accepts whatever is proposed: its output has the draft's distribution.
BROKEN = """
import specahead.kernels.rejection.reference as rules
def accept_all(tokens, counts, draft, target, accept_uniforms, draw_uniforms):
    row = __import__("torch").arange(len(counts))
    return counts, rules.draw(target[row, counts], draw_uniforms[row, counts])
rules.accept_sampled = accept_all
from target_service.__main__ import main
main()
"""


@torch.inference_mode()
def _distributions(prompt: list[int]) -> list[dict[int, float]]:
    """The target's distribution of each of the first three tokens, by plain enumeration of all prefixes."""
    model: Any = load_module(str(TARGET), torch.float32, "cpu", "sdpa")
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    marginals: list[dict[int, float]] = []
    for _ in range(3):
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


def _chi_square(observed: Counter[int], expected: dict[int, float], draws: int) -> float:
    """p-value; outcomes expected fewer than 5 times are taken together."""
    pairs = [(observed[t], p * draws) for t, p in expected.items() if p * draws >= 5]
    rest = draws - sum(o for o, _ in pairs), draws - sum(e for _, e in pairs)
    if rest[1] > 0:
        pairs.append(rest)
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def _p_values(stack: Stack, prompt: list[int], draws: int) -> list[float]:
    stub = stack.stub()

    def run(seed: int) -> list[int]:
        result = generate(stub, prompt, max_tokens=4, temperature=TEMPERATURE, top_p=TOP_P, seed=seed, ignore_eos=True)
        assert result.speculation.drafted >= 3, "the first three tokens go through the acceptance rule"
        return result.tokens[:3]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        samples = list(pool.map(run, range(draws)))
    expected = _distributions(prompt)
    assert all(sum(marginal.values()) == pytest.approx(1, abs=1e-3) for marginal in expected)
    return [_chi_square(Counter(s[i] for s in samples), expected[i], draws) for i in range(3)]


def test_sampled_exact_has_the_targets_distribution(stack: Stack, tokenizer: Any) -> None:
    p_values = _p_values(stack, tokenizer.encode(PROMPT), DRAWS)
    assert min(p_values) > 1e-3, p_values


def test_a_broken_acceptance_rule_is_found_out(tokenizer: Any) -> None:
    services: Services = start_services(target_command=("-c", BROKEN))
    gateway = start_gateway(services)
    try:
        p_values = _p_values(gateway, tokenizer.encode(PROMPT), DRAWS_OF_BROKEN)
    finally:
        gateway.stop()
        services.stop()
    assert max(p_values[:2]) < 1e-6, p_values
