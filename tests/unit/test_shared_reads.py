"""`ahead` with its budget shared out in the pass against the same choice made beforehand, round after round."""

import numpy as np
import pytest
import torch

from specahead import models
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SharedBudget, SparseRead
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.choice import mandatory
from specahead.sparsity.announce import LEAST_WINDOW, announced_rows, shared_room
from specahead.sparsity.budgets import dense_layers, new_memory
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from tests.books import random_tokens as tokens
from tests.plans import bundled_plan
from tests.unit.steps import read_prompt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = bundled_plan()


def announced(rows: int, blocks: int, rng: np.random.Generator) -> BlockSelection:
    return BlockSelection.from_matrix(rng.random((rows, blocks)) < 0.05)


def choose_over_all(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` highest of all scores [..., blocks], as bool of their shape. Only positive scores count."""
    flat = scores.flatten()
    best = flat.topk(min(max(0, count), len(flat)), sorted=False)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[best.indices[best.values > 0]] = True
    return chosen.view(scores.shape)


class ChosenBefore:
    """`ahead` with its choice made on the host, from the weights that the runner remembers, and no room for more."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.memory = runner, new_memory(PLAN, PLAN.memory_decay)

    def read(self, announced: BlockSelection | None, base: int, length: int) -> SparseRead | None:
        if announced is None:
            return None
        blocks = PLAN.num_blocks(length)
        chosen = torch.from_numpy(announced.resized(blocks).matrix())
        always = mandatory(PLAN, base, blocks, LEAST_WINDOW)
        if self.memory.index is not None:
            (weights,) = self.runner.passes.memories._weights.values()
            own = weights[self.memory.index, :, :blocks].cpu() * self.memory.importance[:, None]
            room = shared_room(PLAN, base, blocks) - int((chosen & ~always).sum())
            chosen = chosen | choose_over_all(own.masked_fill(always | chosen, 0), room)
        words = BlockSelection.from_matrix(chosen.numpy()).words
        first, last = PLAN.middle(PLAN.num_blocks(base), LEAST_WINDOW)
        budget = SharedBudget(words, first, last, 0, self.memory, dense_layers(PLAN))
        return SparseRead(PLAN.block_size, budget, group_means=True, report_blocks=True)

    def finish(self, output: SequenceOutput) -> None:
        pass


@pytest.mark.parametrize("gamma", [4, 20])
def test_rounds_read_and_remember_the_same(gamma: int) -> None:
    runners = [
        make_runner(
            load_model(str(models.TARGET), torch.float32, DEVICE), 16384, max_context=1300, step_queries=gamma + 1
        )
        for _ in range(2)
    ]
    for runner in runners:
        runner.kv.keep_group_means(PLAN.group_size)
    lengths = (1200, 530, 90)
    readers = [[ChosenBefore(runners[0]) for _ in lengths], [Reader(PLAN, report_blocks=True) for _ in lengths]]
    sequences = [
        [read_prompt(runner, tokens(length, i), 400) for i, length in enumerate(lengths)] for runner in runners
    ]
    rng = np.random.default_rng(0)
    rows = announced_rows(PLAN)
    read_more = 0
    for turn in range(4):
        bases = [kv.length + 1 for kv in sequences[0]]
        choices = [announced(rows, PLAN.num_blocks(base), rng) for base in bases]
        logits, blocks = [], []
        for runner, held, mine in zip(runners, sequences, readers, strict=True):
            inputs = []
            for i, (kv, reader) in enumerate(zip(held, mine, strict=True)):
                ends = kv.length + gamma + 1
                given = None if turn == 2 and i == 1 else choices[i]  # a round without an announcement
                read = reader.read(given, bases[i], ends)
                inputs.append(SequenceInput(kv, tokens(gamma + 1, 10 * turn + i), "all", read))
            outputs = runner.forward(inputs)
            for reader, output in zip(mine, outputs, strict=True):
                reader.finish(output)
            logits.append([output.logits.cpu() for output in outputs])
            blocks.append([None if output.blocks is None else output.blocks.cpu() for output in outputs])
            for i, kv in enumerate(held):  # some are rejected
                runner.kv.truncate(kv, kv.length - (turn + i) % 3)
        for one, two in zip(*logits, strict=True):
            torch.testing.assert_close(two, one, atol=2e-3, rtol=1e-3)
        for i, (one, two) in enumerate(zip(*blocks, strict=True)):
            assert (one is None) == (two is None) == (turn == 2 and i == 1)
            if two is not None:
                assert torch.equal(one, two)
                read, _ = readers[1][i].tokens_read
                summaries = readers[1][i].summary_tokens * len(PLAN.sparse_layers) * PLAN.target_kv_heads
                assert read == int(two.sum()) * PLAN.block_size + summaries
                read_more += int(two.sum()) > int(choices[i].matrix().sum())
    assert read_more  # the target's own memory had its part
