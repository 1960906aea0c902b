"""What blocks are chosen by, and the likeliest tokens: Triton (on a GPU, or interpreted) and torch against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.selection import Remembered, pack_bits, remember_weights, score_announced, score_blocks, top_few
from specahead.sparsity.selection import BlockSelection

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (2, 3, 64), (3, 4, 1100)]


def ragged(groups: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """first, last, blocks with an empty sequence among them"""
    blocks = torch.randint(0, n + 1, (groups,), generator=generator).int()
    blocks[0] = n
    if groups > 1:
        blocks[1] = 0
    first = torch.minimum(torch.randint(0, 3, (groups,), generator=generator).int(), blocks)
    last = torch.maximum(first, blocks - torch.randint(0, 4, (groups,), generator=generator).int())
    return first, last, blocks


def memory_of(groups: int, rows: int, n: int, blocks: Tensor, generator: torch.Generator) -> Remembered:
    """Two more places than there are groups; none for empty groups."""
    places = torch.randperm(groups + 2, generator=generator)[:groups].int()
    return Remembered(torch.rand(groups + 2, rows, n, generator=generator), places.where(blocks > 0, -1))


def on_device(memory: Remembered) -> Remembered:
    return Remembered(*(part.to(DEVICE, copy=True) for part in memory))


@pytest.mark.parametrize("every", [None, 0, -1])
@pytest.mark.parametrize(("groups", "rows", "n"), SHAPES)
def test_scores_of_what_is_remembered(groups: int, rows: int, n: int, every: int | None) -> None:
    """every: a word that all of them are, of no bits or of all; None: they are random."""
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**63), 2**63 - 1, (groups, rows, -(-n // 64)), generator=generator)
    if every is not None:
        words.fill_(every)
    importance = torch.rand(rows, generator=generator)
    first, last, blocks = ragged(groups, n, generator)
    memory = memory_of(groups, rows, n, blocks, generator)
    if groups > 2:  # one reads everything, and has no memory
        first[2], last[2], blocks[2], memory.places[2] = 0, 0, n, -1
    room = torch.tensor([7, -3, 100][-groups:], dtype=torch.int32)
    given = importance, words, (first, last, blocks), room
    forced, scores, left = score_blocks(memory, *given)
    limits = tuple(each.to(DEVICE) for each in (first, last, blocks))
    got = score_blocks(on_device(memory), importance.to(DEVICE), words.to(DEVICE), limits, room.to(DEVICE), "triton")
    for found, wanted in zip(got, (forced, scores, left), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted)
    bits = BlockSelection(rows * groups, words.shape[2] * 64, words.flatten(0, 1).numpy().view("<u8")).matrix()
    for group in range(groups):
        selection = BlockSelection(rows, n, words[group].numpy().view("<u8"))
        assert left[group] == room[group] - selection.count(int(first[group]), int(last[group]))
        own = memory.weights[memory.places[group]] * importance[:, None]
        for row in range(rows):
            for column in range(min(n, 130)):
                bit = bits[group * rows + row, column]
                wanted = column < blocks[group] and (bit or not first[group] <= column < last[group])
                assert bool(forced[group, row, column]) == bool(wanted)
                counts = not wanted and column < blocks[group]
                assert scores[group, row, column] == (own[row, column] if counts else 0)


@pytest.mark.parametrize(("groups", "rows", "n"), SHAPES)
def test_weights_are_remembered(groups: int, rows: int, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    width, inner = n + 3, rows if rows % 2 else 2
    counts = torch.randint(0, n + 1, (groups, rows), generator=generator).int()
    order = torch.rand(groups, rows, n, generator=generator).argsort(2).int()
    lists = torch.nn.functional.pad(order, (0, 3))
    weights = torch.rand(groups, rows, width, generator=generator)
    _, _, blocks = ragged(groups, n, generator)
    memory = memory_of(groups, rows, n, blocks, generator)
    expected, got, wanted = memory.weights.clone(), on_device(memory), on_device(memory)
    read = [x.unflatten(1, (-1, inner)).transpose(0, 1).contiguous().to(DEVICE) for x in (lists, counts, weights)]
    remember_weights(wanted, *read, blocks.to(DEVICE), 0.8)
    remember_weights(got, *read, blocks.to(DEVICE), 0.8, backend="triton")
    torch.testing.assert_close(got.weights, wanted.weights)
    for group in range(groups):  # what no group has stays as it is
        if memory.places[group] >= 0:
            own = expected[memory.places[group]]
            own *= 0.8
            for row in range(rows):
                at = lists[group, row, : counts[group, row]].long()
                own[row, at] = torch.maximum(own[row, at], weights[group, row, : counts[group, row]])
                own[row, blocks[group] :] = 0
    torch.testing.assert_close(wanted.weights.cpu(), expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 150), st.integers(0, 99))
def test_announced_rows_are_blends_of_heads(
    backend: str, sequences: int, rows: int, width: int, blocks: int, seed: int
) -> None:
    """What was announced counts more, nothing outside the limits; a blend may have fewer heads than there is room."""
    random = torch.Generator().manual_seed(seed)
    evidence = torch.rand(sequences, 5, blocks, generator=random)
    heads = torch.stack([torch.randperm(5, generator=random)[:width] for _ in range(rows)]).int()
    weights = torch.rand(rows, width, generator=random).where(torch.rand(rows, width, generator=random) < 0.7, 0.0)
    announced = torch.rand(sequences, rows, blocks, generator=random) < 0.4
    limits = torch.randint(0, blocks + 1, (3, sequences), generator=random, dtype=torch.int32)
    given = (evidence, heads, weights, pack_bits(announced), limits)
    got = score_announced(*(x.to(DEVICE) for x in given), 1.5, backend).cpu()
    wanted = torch.zeros(sequences, rows, blocks)
    for sequence in range(sequences):
        for row in range(rows):
            blend = sum(weights[row, i] * evidence[sequence, heads[row, i]] for i in range(width))
            wanted[sequence, row] = torch.where(announced[sequence, row], blend * 1.5, blend)
        wanted[sequence, :, : limits[0, sequence]] = 0
        wanted[sequence, :, limits[1, sequence] :] = 0
    torch.testing.assert_close(got, wanted)


# The likeliest tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "entries", "count"), [(1, 1, 1), (3, 4, 4), (5, 97, 1), (2, 4096, 4), (7, 9001, 4)])
def test_the_largest_entries_of_rows(rows: int, entries: int, count: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(entries)
    values = torch.randn(rows, entries, generator=random).to(DEVICE, dtype)  # in bfloat16 many are equal
    values[0, : entries // 2] = -torch.inf
    found, wanted = top_few(values, count, "triton"), top_few(values, count)
    assert found.dtype == wanted.dtype == torch.int64
    assert torch.equal(found, wanted)


def test_the_first_of_equal_entries_comes_first() -> None:
    values = torch.zeros(2, 5000, device=DEVICE)
    values[1, 4500] = values[1, 17] = 1.0
    for found in (top_few(values, 3), top_few(values, 3, "triton")):
        assert found.tolist() == [[0, 1, 2], [17, 4500, 0]]
        assert found[:, 0].tolist() == values.argmax(1).tolist()
    with pytest.raises(ValueError, match="the 4 largest of 3 entries"):
        top_few(torch.zeros(1, 3), 4)
