"""What the device codes of a selection is what the codec sends, byte for byte."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specahead.config.garbage import no_garbage_collected
from specahead.kernels.selection_difference import CodedDifferences, code_difference
from specahead.sparsity.selection import BlockSelection, row_words
from specahead.wire.selection_codec import decode_selection, encode_selection, with_header

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, [1]), (3, 33, [33, 0]), (7, 100, [99, 100, 1]), (2, 1030, [1030, 700])]


def random_selection(random: np.random.Generator, heads: int, blocks: int) -> BlockSelection:
    return BlockSelection.from_matrix(random.random((heads, blocks)) < random.random())


@given(st.integers(0, 2**32), st.integers(1, 5), st.lists(st.integers(1, 300), min_size=1, max_size=3), st.booleans())
def test_the_bytes_are_those_of_the_codec(seed: int, heads: int, lengths: list[int], refers: bool) -> None:
    """Sequences of several lengths side by side, with an earlier selection of another length or without one."""
    random = np.random.default_rng(seed)
    words = row_words(max(lengths)) + int(random.integers(3))
    bitmaps, before = (np.zeros((len(lengths), heads, words), np.uint64) for _ in range(2))
    selections, references = [], []
    for i, blocks in enumerate(lengths):
        selection = random_selection(random, heads, blocks)
        earlier = random_selection(random, heads, max(1, blocks + int(random.integers(-70, 70))))
        width = row_words(blocks)
        bitmaps[i, :, :width] = selection.words
        if refers:
            before[i, :, :width] = earlier.resized(blocks).words
        selections.append(selection)
        references.append(((3, 7), earlier) if refers else None)
    widths = torch.tensor([row_words(blocks) for blocks in lengths], dtype=torch.int32, device=DEVICE)
    tensors = (torch.from_numpy(each.view(np.int64)).to(DEVICE) for each in (bitmaps, before))
    coded = code(*tensors, widths)
    for i, (selection, reference) in enumerate(zip(selections, references, strict=True)):
        flags = coded.flags[i, :, : row_words(selection.num_blocks)].cpu().numpy()
        values = coded.values[i, : int(coded.counts[i])].cpu().numpy()
        checksum = int(coded.checksums[i]) % (1 << 64)
        name = None if reference is None else reference[0]
        body = flags.tobytes() + values.tobytes()
        data = with_header(body, checksum, heads, selection.num_blocks, name)
        assert data == encode_selection(selection, reference)
        held = {} if reference is None else {reference[0]: reference[1]}
        assert (decode_selection(data, held, heads, selection.num_blocks).words == selection.words).all()


def code(bitmaps: Tensor, before: Tensor, widths: Tensor, backend: str = "torch") -> CodedDifferences:
    """Code differences into tensors that were not zero."""
    full, (sequences, rows, words) = partial(torch.full, fill_value=77, device=bitmaps.device), bitmaps.shape
    into = CodedDifferences(
        flags=full((sequences, rows, words), dtype=torch.uint8),
        values=full((sequences, rows * words * 8), dtype=torch.uint8),
        counts=full((sequences,), dtype=torch.int32),
        checksums=full((sequences,), dtype=torch.int64),
    )
    code_difference(bitmaps, before, widths, into, backend)
    return into


def random_words(shape: tuple[int, ...], widths: list[int], random: np.random.Generator) -> torch.Tensor:
    """Return words with few bits, many, none or all of them; those behind a sequence's width are zero."""
    words = np.zeros(shape, np.uint64)
    for of_sequence, width in zip(words, widths, strict=True):
        part = of_sequence[:, :width]
        part[:] = random.integers(0, 2**64, part.shape, np.uint64)
        for _ in range(random.integers(3)):
            part &= random.integers(0, 2**64, part.shape, np.uint64)
        part[random.random(part.shape) < random.random()] = random.choice(np.array([0, 2**64 - 1], np.uint64))
    return torch.from_numpy(words.view(np.int64)).to(DEVICE)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(("rows", "words", "widths"), SHAPES)
def test_triton_codes_as_torch_does(rows: int, words: int, widths: list[int], same: bool) -> None:
    """same: nothing is different. What is written over was not zero."""
    random = np.random.default_rng(rows + words)
    shape = len(widths), rows, words
    bitmaps = random_words(shape, widths, random)
    before = bitmaps.clone() if same else random_words(shape, widths, random)
    given = bitmaps, before, torch.tensor(widths, dtype=torch.int32, device=DEVICE)
    wanted = code(*given)
    into = code(*given, "triton")
    for name in ("flags", "counts", "checksums"):
        assert torch.equal(getattr(into, name), getattr(wanted, name)), name
        assert getattr(into, name).dtype == getattr(wanted, name).dtype
    for got, values, count in zip(into.values, wanted.values, wanted.counts.tolist(), strict=True):
        assert torch.equal(got[:count], values[:count]) and (got[count:] == 77).all()
    assert not same or not wanted.counts.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_it_can_be_captured(backend: str) -> None:
    random = np.random.default_rng(1)
    shape = 2, 3, 4
    bitmaps, before = (torch.from_numpy(random.integers(0, 2**62, shape)).cuda() for _ in range(2))
    widths = torch.tensor([4, 4], dtype=torch.int32, device="cuda")
    wanted = code(bitmaps, before, widths)
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collected(), torch.cuda.graph(graph):  # a graph collected during a capture aborts the process
        coded = code(bitmaps, before, widths, backend)
    graph.replay()
    for name in ("flags", "counts", "checksums"):
        assert torch.equal(getattr(coded, name), getattr(wanted, name)), name
    for got, values, count in zip(coded.values, wanted.values, wanted.counts.tolist(), strict=True):
        assert torch.equal(got[:count], values[:count])
