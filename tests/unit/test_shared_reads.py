"""`ahead` with its budget shared out in the pass against the same choice made beforehand, round after round."""

import numpy as np
import pytest
import torch

import models
from engine.batch import SequenceInput
from engine.families import read_decoder
from engine.graphs import GraphRunner
from engine.kv.pages import SequenceKV
from engine.loading import load_runner
from sparsity.methods import METHODS
from sparsity.plan import load_plan
from sparsity.reader import Reader
from sparsity.selection import BlockSelection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = load_plan(models.PLAN)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def announced(rows: int, blocks: int, rng: np.random.Generator) -> BlockSelection:
    return BlockSelection.from_matrix(rng.random((rows, blocks)) < 0.05)


@pytest.mark.parametrize("gamma", [4, 20])
def test_rounds_read_and_remember_the_same(gamma: int) -> None:
    plain, other = (load_runner(str(models.TARGET), torch.float32, DEVICE, 16384) for _ in range(2))
    shared = GraphRunner(read_decoder(other.model), other, 1300, step_queries=gamma + 1)
    runners = (plain, shared)
    for runner in runners:
        runner.kv.keep_group_means(PLAN.group_size)
    method = METHODS["ahead"]
    lengths = (1200, 530, 90)
    readers = [[Reader(method, PLAN, runner.shares_budgets) for _ in lengths] for runner in runners]
    sequences = [[SequenceKV() for _ in lengths] for _ in runners]
    for runner, held in zip(runners, sequences, strict=True):
        for i, (length, kv) in enumerate(zip(lengths, held, strict=True)):
            for start in range(0, length, 400):
                runner.forward([SequenceInput(kv, tokens(length, i)[start : start + 400])])
    rng = np.random.default_rng(0)
    rows = readers[0][0].announced_rows
    read_more = 0
    for turn in range(4):
        bases = [kv.length + 1 for kv in sequences[0]]
        choices = [announced(rows, PLAN.num_blocks(base), rng) for base in bases]
        logits, counts = [], []
        for runner, held, mine in zip(runners, sequences, readers, strict=True):
            inputs = []
            for i, (kv, reader) in enumerate(zip(held, mine, strict=True)):
                ends = kv.length + gamma + 1
                given = [] if turn == 2 and i == 1 else [choices[i]]  # a round without an announcement
                read = reader.read(given, bases[i], ends)
                inputs.append(SequenceInput(kv, tokens(gamma + 1, 10 * turn + i), "all", read))
            outputs = runner.forward(inputs)
            for reader, output in zip(mine, outputs, strict=True):
                reader.finish(output.read_weights, output.blocks_read)
            logits.append([output.logits.cpu() for output in outputs])  # type: ignore[union-attr]
            counts.append([reader.tokens_read for reader in mine])
            for i, kv in enumerate(held):  # some are rejected
                runner.kv.truncate(kv, kv.length - (turn + i) % 3)
        for one, two in zip(*logits, strict=True):
            torch.testing.assert_close(two, one, atol=2e-3, rtol=1e-3)
        assert counts[0] == counts[1]
        only = PLAN.block_size * sum(int(c.matrix().sum()) for c in choices)
        read_more += sum(read for read, _ in counts[0]) > only
    assert read_more  # the target's own memory had its part


def test_places_are_taken_back() -> None:
    """As many sequences as there is room for remember at once; those that came before do not count."""
    other = load_runner(str(models.TARGET), torch.float32, DEVICE, 4096)
    runner = GraphRunner(read_decoder(other.model), other, 256, step_queries=5)
    runner.keep_memories(2)
    runner.kv.keep_group_means(PLAN.group_size)
    rng = np.random.default_rng(0)

    def step(reader: Reader, kv: SequenceKV) -> None:
        choice = announced(reader.announced_rows, PLAN.num_blocks(kv.length + 1), rng)
        read = reader.read([choice], kv.length + 1, kv.length + 5)
        (output,) = runner.forward([SequenceInput(kv, tokens(5, 1), "all", read)])
        reader.finish(output.read_weights, output.blocks_read)
        runner.kv.truncate(kv, kv.length - 3)

    def start() -> tuple[Reader, SequenceKV]:
        kv = SequenceKV()
        runner.forward([SequenceInput(kv, tokens(200, 2))])
        return Reader(METHODS["ahead"], PLAN, True), kv

    first, second = start(), start()
    for session in (first, second, first):
        step(*session)
    third = start()
    with pytest.raises(RuntimeError, match="2 sequences share budgets out"):
        step(*third)
    runner.kv.release(first[1])
    del first, session
    step(*start())
    with pytest.raises(RuntimeError, match="keep_memories comes before"):
        runner.keep_memories(4)
