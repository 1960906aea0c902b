"""Rounds that read everything run in the pass of those that share budgets, and give what they give alone."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.grouping import join_rounds
from specahead.engine.steps.inputs import ReadMemory, SequenceInput, SequenceOutput, SharedBudget, SparseRead
from specahead.engine.steps.model_runner import ModelRunner
from tests.plans import bundled_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = bundled_plan()
LAYERS, KV_HEADS = PLAN.target_layers, PLAN.target_kv_heads
SAMPLED = Sampling(0.9, 0.95, seed=3)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    runner = make_runner(load_model(str(models.TARGET), torch.float32, DEVICE), 8192)
    runner._joins = True  # as on a GPU
    runner.kv.keep_group_means(64)
    return runner


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 4000, count).tolist()


def budget_of(length: int, drafted: int, dense_layers: tuple[int, ...], drafts: bool = False) -> SparseRead:
    """A third of all blocks, the first and the last ones, and room for more."""
    rows, blocks = (LAYERS - len(dense_layers)) * KV_HEADS, -(-(length + drafted) // 16)
    bitmap = np.full((rows, -(-blocks // 64)), 0x9249249249249249, np.uint64)
    memory = ReadMemory(torch.linspace(0.5, 1.5, rows), 0.8)
    budget = SharedBudget(bitmap, 1, (length - 1) // 16, rows * blocks // 2, memory, dense_layers)
    return SparseRead(16, budget, group_means=not drafts, drafts=drafts)


class Rounds:
    """Three sessions that share budgets and two that read everything, each with KV and two rounds to judge."""

    def __init__(self, runner: ModelRunner, dense_layers: tuple[int, ...]) -> None:
        self.runner = runner
        self.lengths, self.drafted = (300, 81, 200, 420, 17), (3, 0, 2, 9, 0)
        self.prompts = [tokens(length, length) for length in self.lengths]
        counts = zip(self.lengths, self.drafted, strict=True)
        self.reads = [budget_of(*count, dense_layers) if i < 3 else None for i, count in enumerate(counts)]
        self.kv = [SequenceKV(dense=read is None) for read in self.reads]
        runner.forward([SequenceInput(kv, prompt[:-1]) for kv, prompt in zip(self.kv, self.prompts, strict=True)])

    def round(self, together: bool) -> list[SequenceOutput]:
        """Judge a round of each, in one call or one by one."""
        inputs = []
        for i, (prompt, kv, count) in enumerate(zip(self.prompts, self.kv, self.drafted, strict=True)):
            drafted = Drafted(tokens(count, 7 + i), [], SAMPLED if i % 2 else Sampling(0.0), len(prompt))
            inputs.append(SequenceInput(kv, [prompt[-1], *drafted.tokens], "all", self.reads[i], drafted=drafted))
        parts = [inputs] if together else [[item] for item in inputs]
        outputs = [output for part in parts for output in self.runner.forward(part)]
        for kv, length in zip(self.kv, self.lengths, strict=True):
            self.runner.kv.truncate(kv, length - 1)
        return outputs

    def end(self) -> None:
        for kv in self.kv:
            self.runner.kv.release(kv)


@pytest.mark.parametrize("dense_layers", [(), (1,)])
def test_rounds_of_all_kinds_give_what_each_gives_alone(runner: ModelRunner, dense_layers: tuple[int, ...]) -> None:
    found = []
    for together in (False, True):
        rounds = Rounds(runner, dense_layers)
        with patch.object(ModelRunner, "_start", autospec=True, side_effect=ModelRunner._start) as passes:
            outputs = [output for _ in range(2) for output in rounds.round(together)]
        assert passes.call_count == 2 * (1 if together else 5)
        assert [bool(kv.groups) for kv in rounds.kv] == [True, True, True, False, False]  # none where all is read
        places = [
            (kv.table()[at // 16], at % 16)
            for kv, end in zip(rounds.kv, rounds.lengths, strict=True)
            for at in range(end - 1)
        ]
        values = torch.stack([runner.kv.v_pages[-1][page, :, row] for page, row in places])
        found.append(([(output.verdict, output.blocks_read) for output in outputs], values))
        rounds.end()
    (alone, alone_kv), (joined, joined_kv) = found
    for i, ((wanted, read), (verdict, read_together)) in enumerate(zip(alone, joined, strict=True)):
        assert verdict == wanted
        assert read == read_together if i % 5 < 3 else read is None
    torch.testing.assert_close(joined_kv, alone_kv, atol=1e-4, rtol=1e-4)


def test_the_end_of_a_prompt_is_not_joined() -> None:
    """A pass that lists all blocks gives their weights, which thousands of tokens have no room for."""
    drafted = Drafted([2], [], SAMPLED, 40)
    sharing = SequenceInput(SequenceKV(), [1, 2], "all", budget_of(40, 1, ()), drafted)
    whole = SequenceInput(SequenceKV(), [1, 2], "all", drafted=drafted)
    end = SequenceInput(SequenceKV(), [1] * 39 + [2], "all", drafted=drafted)
    joined = join_rounds([sharing, whole, end])
    assert [item.read is not None for item in joined] == [True, True, False]
