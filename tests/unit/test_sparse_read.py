"""Sparse reads through the engine, on the bundled pair's draft: budgets, selectors, means, weights, forks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.steps.inputs import ReadMemory, SequenceInput, SequenceOutput, SharedBudget, SparseRead
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.attending import forward_attending, forward_weighing
from specahead.lab.evaluation.choice import Rounds
from specahead.lab.evaluation.forks import fork
from specahead.lab.evaluation.just_in_time import SequenceKeys
from specahead.lab.evaluation.methods import RIVALS
from specahead.lab.evaluation.models import load_runner
from specahead.lab.evaluation.readers import LayerReader
from specahead.models import DRAFT
from specahead.sparsity.plan import uniform_plan
from specahead.sparsity.selection import BlockSelection, row_words
from tests.unit.exact_reads import read_exactly

LAYERS, KV_HEADS = 4, 2
TOKENS = [(7 * i * i + 3 * i) % 4000 + 50 for i in range(203)]
PREFIX = 199


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_runner(str(DRAFT), torch.float32, "cpu", 16 * 200)


@pytest.fixture
def prompt(runner: ModelRunner) -> Iterator[SequenceKV]:
    sequence = SequenceKV()
    runner.forward([SequenceInput(sequence, TOKENS[:PREFIX])])
    yield sequence
    runner.kv.release(sequence)
    assert runner.kv.pool.held == 0
    runner.kv.pool.check_integrity()
    if runner.kv.means is not None:
        free = runner.kv.means.free
        assert sorted(free) == list(range(len(runner.kv.means.k[0])))
        runner.kv.means = None


@dataclass
class Fixed:
    """A selector (specahead.lab.evaluation.just_in_time) that has made up its mind; `seen`: what it was asked with."""

    chosen: list[Tensor | None]
    seen: list[tuple[int, Tensor, SequenceKeys, float]] = field(default_factory=list)

    def begin(self, rounds: Rounds, evidence: Tensor) -> None:
        pass

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        self.seen.append((layer, queries, keys, scale))
        mask = self.chosen[layer]
        return None if mask is None else mask[None]


def masks(block_size: int, seed: int = 0, prefix: int = PREFIX, length: int = len(TOKENS)) -> list[Tensor]:
    """For each layer bool [kv_heads, blocks], those of the pass's own tokens always chosen."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-length // block_size)
    chosen = [torch.rand(KV_HEADS, blocks, generator=generator) < 0.4 for _ in range(LAYERS)]
    for mask in chosen:
        mask[..., (prefix - 1) // block_size :] = True
    return chosen


def remembered(runner: ModelRunner, read: SparseRead, blocks: int) -> Tensor:
    """What the runner remembers of a read's blocks, float32 [sparse layers, kv_heads, blocks]."""
    rows, size = len(read.budget.memory.importance), read.block_size
    weights = runner.passes.memories.weights(rows, -(-runner._limits.pages * PAGE_SIZE // size), runner.device)
    return weights[read.budget.memory.index].unflatten(0, (-1, KV_HEADS))[..., :blocks]


def run(runner: ModelRunner, prompt: SequenceKV, *reads: SparseRead | None) -> list[Tensor]:
    """Logits of the last tokens of a twin for each read, all in one pass."""
    forks = [fork(runner.kv, prompt) for _ in reads]
    inputs = [SequenceInput(kv, TOKENS[PREFIX:], "all", read) for kv, read in zip(forks, reads, strict=True)]
    outputs = runner.forward(inputs)
    for kv in forks:
        runner.kv.release(kv)
    return [output.logits for output in outputs if output.logits is not None]


def attend(runner: ModelRunner, prompt: SequenceKV, selector: Fixed, block_size: int) -> Tensor:
    """Logits of the last tokens of a twin whose layers read what the selector says."""
    plan = uniform_plan(LAYERS, KV_HEADS, 1, 1, block_size=block_size)
    reader = LayerReader(RIVALS["oracle"], plan)
    reader._selector = selector
    twin = fork(runner.kv, prompt)
    item = SequenceInput(twin, TOKENS[PREFIX:], "all")
    reader.read(Rounds(PREFIX, len(TOKENS) - PREFIX, 1), torch.zeros(1, 1, 1, -(-len(TOKENS) // block_size)))
    logits = forward_attending(runner, item.kv, item.tokens, reader.attend(runner, item))
    given = reader.finish()
    runner.kv.release(twin)
    assert twin.length == 0
    for read, mask in zip(given.chosen[0], selector.chosen, strict=True):
        wanted = torch.ones_like(read) if mask is None else mask
        assert torch.equal(read, wanted)
    return logits


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_reading_every_block_is_reading_densely(runner: ModelRunner, prompt: SequenceKV, block_size: int) -> None:
    everything = [torch.ones_like(mask) for mask in masks(block_size)]
    runner.kv.keep_group_means(64)
    reads = [read_exactly(everything, block_size), read_exactly(everything, block_size, group_means=True)]
    dense, *others = run(runner, prompt, None, *reads)
    selected = attend(runner, prompt, Fixed([*everything[:2], None, everything[3]]), block_size)
    for logits in (*others, selected):
        torch.testing.assert_close(logits, dense, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_a_selector_reads_what_it_chooses(runner: ModelRunner, prompt: SequenceKV, block_size: int) -> None:
    chosen = masks(block_size)
    dense, by_list = run(runner, prompt, None, read_exactly(chosen, block_size))
    by_selector = attend(runner, prompt, Fixed(list(chosen)), block_size)
    torch.testing.assert_close(by_selector, by_list, atol=1e-4, rtol=1e-3)
    assert (by_list - dense).abs().max() > 0.05, "the choice matters"


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_the_weights_of_what_is_read_are_remembered(
    runner: ModelRunner, prompt: SequenceKV, block_size: int, means: bool
) -> None:
    """Where everything is read they are those of a dense pass; what is not read has none."""
    runner.kv.keep_group_means(64)
    rows, chosen = len(TOKENS) - PREFIX, [*masks(block_size)]
    blocks = chosen[0].shape[1]
    everything = read_exactly([torch.ones_like(mask) for mask in chosen], block_size, group_means=means)
    some = read_exactly([chosen[0], None, *chosen[2:]], block_size, group_means=means)
    forks = [fork(runner.kv, prompt) for _ in range(3)]
    _, weights = forward_weighing(runner, forks[0], TOKENS[PREFIX:], block_size, rows)
    for kv, read in zip(forks[1:], (everything, some), strict=True):
        runner.forward([SequenceInput(kv, TOKENS[PREFIX:], read=read)])
    wanted = weights.mean(1).unflatten(1, (KV_HEADS, -1)).sum(2)
    torch.testing.assert_close(remembered(runner, everything, blocks), wanted, atol=1e-5, rtol=1e-4)
    kept = remembered(runner, some, blocks)
    assert not kept[~torch.stack([chosen[0], *chosen[2:]])].any()
    mass = kept.sum(-1)
    # Two query heads to a KV head; stand-ins take a part of it.
    assert (mass < 1.999).any() if means else torch.allclose(mass, torch.full_like(mass, 2.0), atol=1e-4)
    for kv in forks:
        runner.kv.release(kv)


def shared(prefix: int, length: int, size: int, dense_layers: tuple[int, ...] = (), **options: bool) -> SparseRead:
    """A budget without room for more than what is read in any case: one block of three, the first and the last ones."""
    rows, blocks = (LAYERS - len(dense_layers)) * KV_HEADS, -(-length // size)
    selection = BlockSelection.from_matrix(np.arange(rows * blocks).reshape(rows, blocks) % 3 == 0)
    assert selection.words.shape == (rows, row_words(blocks))
    memory = ReadMemory(torch.linspace(0.5, 1.5, rows), 0.8)
    last = (prefix - 1) // size
    budget = SharedBudget(selection.words, min(1, last), last, 0, memory, dense_layers)
    return SparseRead(size, budget, report_blocks=True, **options)


def test_budgets_of_several_shapes_are_shared_out_side_by_side(runner: ModelRunner, prompt: SequenceKV) -> None:
    """Each reads in a second pass, by its memory alone, what it read in the first."""
    sizes: list[tuple[int, tuple[int, ...]]] = [(16, ()), (16, (0,)), (1, ()), (64, (1, 2)), (16, ())]
    reads = [shared(PREFIX, len(TOKENS), size, dense) for size, dense in sizes]
    kept = []
    for room in (0, 10_000):
        forks = [fork(runner.kv, prompt) for _ in reads]
        for read in reads:
            read.budget.room = room
        inputs = [SequenceInput(kv, TOKENS[PREFIX:], read=read) for kv, read in zip(forks, reads, strict=True)]
        outputs = runner.forward(inputs)
        for kv in forks:
            runner.kv.release(kv)
        kept.append(outputs)
        for read in reads:  # nothing is read in any case the next time
            read.budget.bitmap = np.zeros_like(read.budget.bitmap)
    for (size, dense), first, second in zip(sizes, *kept, strict=True):
        assert second.blocks is not None
        assert first.blocks.shape[2] == -(-len(TOKENS) // size)
        assert first.blocks[list(dense)].all()
        sparse = [layer for layer in range(LAYERS) if layer not in dense]
        assert first.blocks_read == first.blocks[sparse].sum() < first.blocks[sparse].numel()
        assert torch.equal(second.blocks, first.blocks), "what was read is remembered, nothing else is"
    alone, other = kept[0][0].blocks, kept[0][-1].blocks
    assert torch.equal(alone, other)


def test_a_batch_of_all_kinds_gives_what_each_gives_alone(runner: ModelRunner, prompt: SequenceKV) -> None:
    """Sequences of several lengths and numbers of queries, in an order that is not the parts'."""
    runner.kv.keep_group_means(64)

    def forward(chosen: list[tuple[int, int, dict[str, Any]]]) -> list[SequenceOutput]:
        forks, inputs = [], []
        for prefix, count, options in chosen:
            kv = fork(runner.kv, prompt)
            runner.kv.truncate(kv, prefix)
            forks.append(kv)
            inputs.append(SequenceInput(kv, TOKENS[prefix : prefix + count], **options))
        outputs = runner.forward(inputs)
        assert [kv.length for kv in forks] == [prefix + count for prefix, count, _ in chosen]
        for kv in forks:
            runner.kv.release(kv)
        return outputs

    def lists(prefix: int, count: int, size: int, seed: int, **options: bool) -> SparseRead:
        return read_exactly(masks(size, seed, prefix, prefix + count), size, **options)

    def budget(prefix: int, count: int, size: int, *dense_layers: int, **options: bool) -> SparseRead:
        return shared(prefix, prefix + count, size, dense_layers, **options)

    batch: list[tuple[int, int, dict[str, Any]]] = [
        (160, 3, {"logits": "all", "read": budget(160, 3, 16, group_means=True)}),
        (199, 4, {"logits": "all", "read": lists(199, 4, 16, 2, group_means=True)}),
        (199, 4, {"logits": "all"}),
        (199, 4, {"logits": "all", "read": budget(199, 4, 16, 0)}),
        (199, 4, {"logits": "all", "read": budget(199, 4, 1)}),
        (199, 4, {"logits": "all", "read": budget(199, 4, 16)}),
        (32, 5, {"logits": "last", "read": lists(32, 5, 16, 4, group_means=True)}),  # no groups yet
        (128, 4, {"logits": "all", "read": lists(128, 4, 16, 5, group_means=True)}),
        (16, 1, {"logits": "last"}),
        (144, 2, {"logits": "last", "read": lists(144, 2, 64, 6)}),
        (64, 4, {"logits": "all", "read": lists(64, 4, 16, 7)}),
        (160, 1, {"logits": "all"}),
        (192, 4, {"logits": "none", "read": lists(192, 4, 1, 8)}),
        (80, 3, {"logits": "all", "read": lists(80, 3, 16, 9)}),
        (112, 2, {"logits": "all", "read": lists(112, 2, 16, 10, group_means=True)}),
        (160, 3, {"logits": "all", "read": lists(160, 3, 16, 11)}),
    ]
    for item, together in zip(batch, forward(batch), strict=True):
        _, count, options = item
        (alone,) = forward([item])
        rows = {"all": count, "last": 1, "none": None}[options["logits"]]
        assert (None if together.logits is None else len(together.logits)) == rows
        for name, wanted in vars(alone).items():
            got = getattr(together, name)
            if wanted is None:
                assert got is None
            else:
                torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-3)


def test_sequences_with_other_dense_layers_share_a_pass(runner: ModelRunner, prompt: SequenceKV) -> None:
    reads = []
    for dense in (None, 0, 2):
        reads.append(read_exactly([None if layer == dense else mask for layer, mask in enumerate(masks(16))], 16))
    together = run(runner, prompt, *reads)
    for read, logits in zip(reads, together, strict=True):
        torch.testing.assert_close(logits, run(runner, prompt, read)[0], atol=2e-4, rtol=1e-3)
    assert (together[0] - together[1]).abs().max() > 0.01


def test_forks_do_not_reach_each_other(runner: ModelRunner, prompt: SequenceKV) -> None:
    one, other = fork(runner.kv, prompt), fork(runner.kv, prompt)
    runner.forward([SequenceInput(one, [9] * 20), SequenceInput(other, [11] * 3)])
    again = fork(runner.kv, prompt)
    (first,) = runner.forward([SequenceInput(again, TOKENS[PREFIX:], "all")])
    (wanted,) = run(runner, prompt, None)
    assert torch.equal(first.logits, wanted)
    for kv in (one, other, again):
        runner.kv.release(kv)
