"""The GPU engine's runner against the plain one: the same logits and weights, from prompts, steps and sparse reads.

Without a GPU its passes run eagerly through the torch kernels; on a GPU they are captured.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model, load_modules
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling, Support
from specahead.engine.sampling.judging import Drafted, judge_by_rules
from specahead.engine.sampling.logit_rules import rules_of
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from tests.books import random_tokens
from tests.unit.exact_reads import read_exactly
from tests.unit.fake_models import judge_rounds
from tests.unit.tiny_models import save_tiny, sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 97
SIZES = sizes(4, 2, hidden_size=64, num_hidden_layers=3, max_position_embeddings=512)
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3 rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA_3_ROPE),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "granite": lambda: transformers.GraniteConfig(**SIZES, attention_multiplier=0.1, residual_multiplier=0.3),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
}
tokens = partial(random_tokens, vocab=VOCAB)


@pytest.fixture
def folder(request: Any, tmp_path: Path) -> str:
    save_tiny(CONFIGS[request.param](), tmp_path)
    return str(tmp_path)


class Pair:
    """The same sequences in both runners."""

    def __init__(self, folder: str, sequences: int) -> None:
        self.graphs = make_runner(load_model(folder, torch.float32, DEVICE), 4096, max_context=400)
        modules, kv = load_modules(folder, torch.float32, DEVICE).decoder, self.graphs.kv
        of_model = kv.num_layers, kv.kv_heads, kv.k_pages[0].shape[3]
        self.plain = ModelRunner(modules, KVCache(*of_model, 256, device=DEVICE), VOCAB, 400)
        passes = self.plain.passes
        passes.model, passes._cudnn = replace(passes.model, attention="torch"), False
        self.runners = (self.plain, self.graphs)
        self.sequences = [[SequenceKV() for _ in range(sequences)] for _ in self.runners]

    def forward(self, items: list[tuple[int, dict[str, Any]]]) -> tuple[list[SequenceOutput], ...]:
        """items: which sequence, and the rest of its SequenceInput"""
        given = items
        results = []
        for runner, sequences in zip(self.runners, self.sequences, strict=True):
            if runner is self.plain:  # gives logits, to be judged by the references
                items = [(i, rest | {"drafted": None}) for i, rest in items]
            results.append(runner.forward([SequenceInput(sequences[i], **rest) for i, rest in items]))
            items = given
        return tuple(results)

    def peek(self, sequence: int, after: list[int]) -> int:
        """The likeliest token after these; nothing stays."""
        kv = self.sequences[0][sequence]
        length = kv.length
        (output,) = self.plain.forward([SequenceInput(kv, after, "last")])
        self.plain.kv.truncate(kv, length)
        return int(output.logits.argmax())

    def check(self, items: list[tuple[int, dict[str, Any]]]) -> None:
        for wanted, got in zip(*self.forward(items), strict=True):
            assert (wanted.logits is None) == (got.logits is None)
            if wanted.logits is not None:
                torch.testing.assert_close(got.logits.cpu(), wanted.logits.cpu(), atol=5e-5, rtol=1e-3)


# On a CPU, where nothing is captured, test_architectures goes through all families.
@pytest.mark.parametrize("folder", CONFIGS if DEVICE == "cuda" else ["llama"], indirect=True)
def test_prompts_and_steps(folder: str) -> None:
    pair = Pair(folder, 3)
    pair.check([(i, {"tokens": tokens(n, i)}) for i, n in enumerate((130, 17, 40))])
    pair.check([(0, {"tokens": tokens(1, 3), "logits": "last"})])
    pair.check([(i, {"tokens": tokens(5, 4 + i), "logits": "all"}) for i in range(3)])
    # Ragged, and one that reads a prompt beside steps.
    counts = [(0, 1), (1, 30), (2, 5)]
    pair.check([(i, {"tokens": tokens(n, 7 + i), "logits": "all"}) for i, n in counts])
    for runner, sequences in zip(pair.runners, pair.sequences, strict=True):
        runner.kv.truncate(sequences[1], 45)
    pair.check([(i, {"tokens": tokens(2, 9 + i), "logits": "last"}) for i in range(3)])


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(("block_size", "group_means"), [(16, False), (16, True), (32, True)])
def test_sparse_reads(folder: str, block_size: int, group_means: bool) -> None:
    pair = Pair(folder, 2)
    for runner in pair.runners:
        runner.kv.keep_group_means(64)
    lengths = (200, 70)
    pair.check([(i, {"tokens": tokens(n, i)}) for i, n in enumerate(lengths)])
    for step in range(2):
        items = []
        for i, before in enumerate(lengths):
            blocks = -(-(before + 5 * (step + 1)) // block_size)
            generator = torch.Generator().manual_seed(10 * step + i)
            chosen = [torch.rand(2, blocks, generator=generator) < 0.5 for _ in range(2)]
            for mask in chosen:
                mask[:, -1] = True
            read = read_exactly([None, *chosen], block_size, group_means=group_means)
            items.append((i, {"tokens": tokens(5, 20 + i), "logits": "all", "read": read}))
        pair.check(items)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_verdicts_are_those_of_the_logits(folder: str, temperature: float) -> None:
    """Rounds are ragged, dense and over lists; one is plain, one has rules, and greedy ones run beside sampled ones."""
    pair = Pair(folder, 4)
    pair.check([(i, {"tokens": tokens(n, i)}) for i, n in enumerate((130, 17, 40, 60))])
    verdicts = []
    ruled = Sampling(temperature, 0.9, 3, top_k=9, frequency_penalty=1.5, logit_bias={5: 2.0})
    rules, rules_apart = rules_of(ruled, 60, []), rules_of(ruled, 60, [])
    for step in range(4):
        items = []
        for i, count in enumerate((4, 0, 2, 3)):
            base = pair.sequences[1][i].length + 1
            sampling = Sampling(temperature if i else 0.0, 0.9, seed=i, top_k=5 if i == 2 else 0)
            # What the target itself would draw, now and then: so that some are kept.
            first = tokens(1, 30 + step)
            chosen = first
            for _ in range(count):
                best = pair.peek(i, chosen)
                chosen = [*chosen, best if (step + i) % 3 else (best + 1) % VOCAB]
            supports = []
            if step % 2 and not sampling.greedy:
                supports = [
                    Support(np.array([t, (t + 1) % VOCAB]), np.array([0.75, 0.25], np.float32)) for t in chosen[1:]
                ]
            read = None
            if step >= 2:
                blocks = -(-(base - 1 + len(chosen)) // 16)
                read = read_exactly([torch.ones(2, blocks, dtype=torch.bool)] * 3, 16)
            drafted = Drafted(chosen[1:], supports, sampling, base)
            if i == 3:
                drafted = replace(
                    drafted, sampling=ruled, rules=rules, committed=[n % 9 for n in range(base)], logprobs=2
                )
            items.append((i, {"tokens": chosen, "logits": "all", "read": read, "drafted": drafted}))
        plain, judged = pair.forward(items)
        drafted_all = [rest["drafted"] for _, rest in items]
        wanted = judge_rounds([output.logits for output in plain[:3]], drafted_all[:3])
        logits = plain[3].logits
        (by_rules,) = judge_by_rules(logits[None], [replace(drafted_all[3], rules=rules_apart)])
        wanted.append(by_rules.verdict)
        assert len(judged[3].logprobs) == wanted[3][0] + 1
        for found, expected in zip(judged[3].logprobs, by_rules.logprobs, strict=True):
            assert found.top_ids == expected.top_ids
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [output.verdict for output in judged] == wanted
        assert all(output.logits is None for output in judged)
        verdicts += wanted
    assert len({accepted for accepted, _ in verdicts}) > 1


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("ruled", [False, True])
def test_logits_that_are_no_numbers_are_found_in_their_sequence(folder: str, ruled: bool) -> None:
    runner = make_runner(load_model(folder, torch.float32, DEVICE), 4096, max_context=400)
    good, bad = SequenceKV(), SequenceKV()
    runner.forward([SequenceInput(kv, tokens(40, 1)) for kv in (good, bad)])
    runner.kv.v_pages[0][bad.pages[0]] = torch.nan
    run = tokens(3, 2)
    drafted = Drafted(run[1:], [], Sampling(0.0), 41, logprobs=1 if ruled else None)
    outputs = runner.forward([SequenceInput(kv, list(run), "all", drafted=drafted) for kv in (good, bad)])
    assert [output.finite for output in outputs] == [True, False]
