"""Sparse reads through the engine, on the bundled pair's draft model: lists, selectors, means, weights, forks."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.batch import SequenceInput, SequenceKeys, SparseRead
from engine.loading import load_runner, output_projections
from engine.paged_kv import SequenceKV
from engine.runner import ModelRunner
from kernels.selection import compact
from models import DRAFT

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


@dataclass
class Fixed:
    """A selector that has made up its mind."""

    chosen: list[Tensor | None]

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        assert keys.length == len(TOKENS)
        return self.chosen[layer]


def masks(block_size: int, seed: int = 0, rows: tuple[int, ...] = ()) -> list[Tensor]:
    """For each layer bool [*rows, kv_heads, blocks], the last blocks always chosen."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-len(TOKENS) // block_size)
    chosen = [torch.rand(*rows, KV_HEADS, blocks, generator=generator) < 0.4 for _ in range(LAYERS)]
    for mask in chosen:
        mask[..., (PREFIX - 1) // block_size :] = True
    return chosen


def listed(chosen: list[Tensor], block_size: int, **options: bool) -> SparseRead:
    return SparseRead(block_size, [compact(mask) for mask in chosen], **options)


def run(runner: ModelRunner, prompt: SequenceKV, *reads: SparseRead | None) -> list[Tensor]:
    """Logits of the last tokens of a fork for each read, all in one pass."""
    forks = [runner.kv.fork(prompt) for _ in reads]
    inputs = [SequenceInput(kv, TOKENS[PREFIX:], "all", read) for kv, read in zip(forks, reads, strict=True)]
    outputs = runner.forward(inputs)
    for kv in forks:
        runner.kv.release(kv)
    return [output.logits for output in outputs if output.logits is not None]


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_reading_every_block_is_reading_densely(
    runner: ModelRunner, prompt: SequenceKV, block_size: int
) -> None:
    everything = [torch.ones_like(mask) for mask in masks(block_size)]
    runner.kv.keep_group_means(64)
    reads = [
        listed(everything, block_size),
        listed(everything, block_size, group_means=block_size < 64 or True, emit=True),
        SparseRead(block_size, selector=Fixed([*everything[:2], None, everything[3]])),
    ]
    dense, *others = run(runner, prompt, None, *reads)
    for logits in others:
        torch.testing.assert_close(logits, dense, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_a_selector_reads_what_it_chooses(runner: ModelRunner, prompt: SequenceKV, block_size: int) -> None:
    chosen = masks(block_size)
    dense, by_list, by_selector = run(
        runner, prompt, None, listed(chosen, block_size), SparseRead(block_size, selector=Fixed(list(chosen)))
    )
    torch.testing.assert_close(by_selector, by_list, atol=1e-4, rtol=1e-3)
    assert (by_list - dense).abs().max() > 0.05, "the choice matters"


def test_queries_that_choose_alike_read_as_one_choice_does(runner: ModelRunner, prompt: SequenceKV) -> None:
    chosen = masks(16)
    rows = len(TOKENS) - PREFIX
    each = [mask.expand(rows, -1, -1) for mask in chosen]
    together, apart = run(runner, prompt, listed(chosen, 16), SparseRead(16, selector=Fixed(list(each))))
    torch.testing.assert_close(apart, together, atol=1e-4, rtol=1e-3)
    other = masks(16, seed=1, rows=(rows,))
    (different,) = run(runner, prompt, SparseRead(16, selector=Fixed(list(other))))
    assert (different - together).abs().max() > 0.05


def test_read_weights_of_everything_are_the_dense_weights(runner: ModelRunner, prompt: SequenceKV) -> None:
    everything = [torch.ones_like(mask) for mask in masks(16)]
    rows = len(TOKENS) - PREFIX
    dense, sparse = runner.kv.fork(prompt), runner.kv.fork(prompt)
    inputs = [
        SequenceInput(dense, TOKENS[PREFIX:], block_size=16, emitting=rows),
        SequenceInput(sparse, TOKENS[PREFIX:], read=listed(everything, 16, emit=True)),
    ]
    emitted, read = runner.forward(inputs)
    assert emitted.block_weights is not None
    assert read.read_weights is not None
    wanted = emitted.block_weights.mean(1).unflatten(1, (KV_HEADS, -1)).sum(2)
    torch.testing.assert_close(read.read_weights, wanted, atol=1e-5, rtol=1e-4)
    for kv in (dense, sparse):
        runner.kv.release(kv)


def test_what_is_not_read_has_no_weight(runner: ModelRunner, prompt: SequenceKV) -> None:
    chosen = masks(16)
    runner.kv.keep_group_means(64)
    for means in (False, True):
        fork = runner.kv.fork(prompt)
        (output,) = runner.forward(
            [SequenceInput(fork, TOKENS[PREFIX:], read=listed(chosen, 16, group_means=means, emit=True))]
        )
        assert output.read_weights is not None
        assert not output.read_weights[~torch.stack(chosen)].any()
        mass = output.read_weights.sum(-1)
        # Two query heads to a KV head; stand-ins take a part of it.
        assert (mass < 1.999).any() if means else torch.allclose(mass, torch.full_like(mass, 2.0), atol=1e-4)
        runner.kv.release(fork)


def test_a_batch_of_all_kinds_gives_what_each_gives_alone(runner: ModelRunner, prompt: SequenceKV) -> None:
    runner.kv.keep_group_means(64)
    chosen = masks(16)
    reads = [
        None,
        listed(chosen, 16),
        listed(masks(16, 2), 16, group_means=True, emit=True),
        SparseRead(16, selector=Fixed(list(masks(16, 3)))),
        listed(masks(64, 4), 64),
        SparseRead(16, selector=Fixed(list(masks(16, 5, (len(TOKENS) - PREFIX,))))),
    ]
    together = run(runner, prompt, *reads)
    for read, logits in zip(reads, together, strict=True):
        (alone,) = run(runner, prompt, read)
        torch.testing.assert_close(logits, alone, atol=2e-4, rtol=1e-3)


def test_means_bring_the_result_nearer(runner: ModelRunner, prompt: SequenceKV) -> None:
    """Over several choices: what stands in for the unread part is better than nothing."""
    runner.kv.keep_group_means(64)
    nearer = 0
    for seed in range(6):
        chosen = masks(16, seed)
        dense, without, stood_in = run(
            runner, prompt, None, listed(chosen, 16), listed(chosen, 16, group_means=True)
        )
        nearer += bool((stood_in - dense).norm() < (without - dense).norm())
    assert nearer == 6


def test_means_without_room_for_them_are_an_error(runner: ModelRunner) -> None:
    sequence = SequenceKV()
    runner.kv.means = None
    with pytest.raises(ValueError, match="keep_group_means"):
        runner.forward([SequenceInput(sequence, TOKENS, read=listed(masks(16), 16, group_means=True))])
    runner.kv.release(sequence)


def test_forks_do_not_reach_each_other(runner: ModelRunner, prompt: SequenceKV) -> None:
    one, other = runner.kv.fork(prompt), runner.kv.fork(prompt)
    runner.forward([SequenceInput(one, [9] * 20), SequenceInput(other, [11] * 3)])
    again = runner.kv.fork(prompt)
    (first,) = runner.forward([SequenceInput(again, TOKENS[PREFIX:], "all")])
    (wanted,) = run(runner, prompt, None)
    assert torch.equal(first.logits, wanted)  # type: ignore[arg-type]
    for kv in (one, other, again):
        runner.kv.release(kv)


def test_group_means_are_those_of_the_pages(runner: ModelRunner, prompt: SequenceKV) -> None:
    runner.kv.keep_group_means(64)
    means = runner.kv.group_means([prompt], torch.device("cpu"))
    assert prompt.groups
    assert len(prompt.groups) == PREFIX // 64 == int(means[0].counts[0])
    assert runner.kv.means is not None
    for layer, made in enumerate(means):
        keys = runner.kv.k_pages[layer][prompt.pages].transpose(0, 1).flatten(1, 2)[:, 64:128]
        torch.testing.assert_close(made.k[prompt.groups[1]], keys.mean(1))
        torch.testing.assert_close(made.k_variance[prompt.groups[1]], keys.var(1, correction=0))
    free = len(runner.kv.means.free)
    assert runner.kv.group_means([prompt], torch.device("cpu"))
    assert len(runner.kv.means.free) == free, "made once"
    runner.kv.truncate(prompt, 130)
    assert len(prompt.groups) == 2
    runner.kv.truncate(prompt, 100)
    assert len(prompt.groups) == 1
    assert len(runner.kv.means.free) == free + 2


def test_a_read_is_by_lists_or_by_a_selector() -> None:
    with pytest.raises(ValueError, match="either lists or a selector"):
        SparseRead(16)
    with pytest.raises(ValueError, match="either lists or a selector"):
        SparseRead(16, [None], Fixed([None]))


def test_output_projections(runner: ModelRunner) -> None:
    found = output_projections(runner.model)
    assert [tuple(weight.shape) for weight in found] == [(128, 256)] * LAYERS
    with pytest.raises(NotImplementedError, match="no output projection"):
        output_projections(type("Bare", (torch.nn.Module,), {"config": runner.model.config})())
