"""`ahead` with its budget shared out in the pass against the same choice made beforehand, round after round."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.lab.evaluation.choice import choose_over_all
from specahead.sparsity.announce import LEAST_WINDOW, shared_room
from specahead.sparsity.choice import mandatory
from specahead.sparsity.methods import METHODS
from specahead.sparsity.reader import Reader, to_lists
from specahead.sparsity.selection import BlockSelection
from tests.plans import bundled_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = bundled_plan()


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def announced(rows: int, blocks: int, rng: np.random.Generator) -> BlockSelection:
    return BlockSelection.from_matrix(rng.random((rows, blocks)) < 0.05)


class ChosenBefore:
    """`ahead` with its choice made on the host from the weights that a pass gives: what the shared budget must do."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None

    def read(self, announced: BlockSelection | None, base: int, length: int) -> SparseRead | None:
        if announced is None:
            return None
        blocks = PLAN.num_blocks(length)
        shape = len(PLAN.sparse_layers), PLAN.target_kv_heads, blocks
        chosen = torch.from_numpy(announced.resized(blocks).matrix()).view(shape)
        always = mandatory(PLAN, base, blocks, LEAST_WINDOW)
        if self.memory is not None:
            memory = pad(self.memory, (0, blocks - self.memory.shape[-1]))[PLAN.sparse_layers]
            importance = torch.tensor([PLAN.head_importance[layer] for layer in PLAN.sparse_layers])
            own = (memory * importance[..., None]).masked_fill(always | chosen, 0)
            room = shared_room(PLAN, base, blocks) - int((chosen & ~always).sum())
            chosen = chosen | choose_over_all(own, room)
        return SparseRead(PLAN.block_size, to_lists(chosen | always, PLAN), None, True, True, True)

    def finish(self, output: SequenceOutput) -> None:
        weights = output.read_weights
        if weights is not None:
            faded = torch.zeros_like(weights)
            if self.memory is not None:
                faded = PLAN.memory_decay * pad(self.memory, (0, weights.shape[-1] - self.memory.shape[-1]))
            self.memory = torch.maximum(weights, faded)


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
    readers = [[ChosenBefore() for _ in lengths], [Reader(METHODS["ahead"], PLAN, report_blocks=True) for _ in lengths]]
    sequences = [[SequenceKV() for _ in lengths] for _ in runners]
    for runner, held in zip(runners, sequences, strict=True):
        for i, (length, kv) in enumerate(zip(lengths, held, strict=True)):
            for start in range(0, length, 400):
                runner.forward([SequenceInput(kv, tokens(length, i)[start : start + 400])])
    rng = np.random.default_rng(0)
    rows = METHODS["ahead"].announcing.rows(PLAN)  # type: ignore[union-attr]
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
            logits.append([output.logits.cpu() for output in outputs])  # type: ignore[union-attr]
            blocks.append([output.blocks for output in outputs])
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


def test_places_are_taken_back() -> None:
    """As many sequences as there is room for remember at once; those that came before do not count."""
    runner = make_runner(load_model(str(models.TARGET), torch.float32, DEVICE), 4096, max_context=256)
    runner.keep_memories(2)
    runner.kv.keep_group_means(PLAN.group_size)
    rng = np.random.default_rng(0)

    def step(reader: Reader, kv: SequenceKV) -> None:
        choice = announced(reader.announced_rows, PLAN.num_blocks(kv.length + 1), rng)
        read = reader.read(choice, kv.length + 1, kv.length + 5)
        (output,) = runner.forward([SequenceInput(kv, tokens(5, 1), "all", read)])
        reader.finish(output)
        runner.kv.truncate(kv, kv.length - 3)

    def start() -> tuple[Reader, SequenceKV]:
        kv = SequenceKV()
        runner.forward([SequenceInput(kv, tokens(200, 2))])
        return Reader(METHODS["ahead"], PLAN), kv

    first, second = start(), start()
    for session in (first, second, first):
        step(*session)
    third = start()
    with pytest.raises(RuntimeError, match="the reads of 2 sequences are remembered"):
        step(*third)
    runner.kv.release(first[1])
    del first, session
    step(*start())
    with pytest.raises(RuntimeError, match="keep_memories comes before"):
        runner.keep_memories(4)
