"""What a draft reads by its own weights: Triton (on a GPU, or interpreted) against torch, and torch against loops."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.draft_reads import count_reads, keep_unread, score_own_blocks
from tests.compiling import compile_for_a_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(0, 99)
)


def weights_of(random: torch.Generator, places: int, heads: int, blocks: int) -> Tensor:
    """Sums of these are exact."""
    return torch.randint(0, 1000, (places, heads, blocks), generator=random).float()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 3), st.integers(0, 5), st.booleans(), st.booleans())
def test_scores(
    backend: str, sizes: tuple[int, ...], first: int, newest: int, by_place: bool, known_less: bool
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    layers, sequences, kv_heads, group, blocks, seed = sizes
    size, share, random = 4, 0.3, torch.Generator().manual_seed(seed)
    heads, places = layers * kv_heads * group, torch.randperm(sequences + 1, generator=random)[:sequences]
    weights = weights_of(random, sequences + 1 if by_place else sequences, heads, blocks + 3 * by_place)
    lengths = torch.randint(0, blocks * size - 1, (sequences,), generator=random, dtype=torch.int32)
    lengths[torch.rand(sequences, generator=random) < 0.2] = 0
    ends = torch.minimum(lengths + 5, torch.tensor(blocks * size, dtype=torch.int32))
    known = (lengths * torch.rand(sequences, generator=random)).int()
    given_ = weights, places if by_place else None, known if known_less else None, lengths, ends
    scores, valid, counts = score_own_blocks(
        *(None if tensor is None else tensor.to(DEVICE) for tensor in given_),
        (layers, kv_heads, blocks, size),
        (first, newest),
        share,
        backend,
    )
    scores = scores.view(layers, sequences, kv_heads, blocks)
    for sequence in range(sequences):
        length, there = int(lengths[sequence]), -(-int(ends[sequence]) // size) if lengths[sequence] else 0
        recent = -(-length // size) - newest
        recent = min(recent, int(known[sequence]) // size) if known_less else recent
        anyway = {block for block in range(blocks) if block < first or block >= recent}
        wanted = max(int(torch.tensor(there) * share), len(anyway & set(range(there))))
        own = (
            weights[places[sequence] if by_place else sequence, :, :blocks].view(layers, kv_heads, group, blocks).sum(2)
        )
        own[..., sorted(anyway)] = torch.inf
        assert torch.equal(scores[:, sequence].cpu(), own)
        assert (valid.view(layers, sequences, kv_heads)[:, sequence] == there).all()
        assert (counts.view(layers, sequences, kv_heads)[:, sequence] == wanted).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_what_is_not_read_stays_known(backend: str, sizes: tuple[int, ...]) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    layers, sequences, kv_heads, group, blocks, seed = sizes
    random = torch.Generator().manual_seed(seed)
    heads, places = kv_heads * group, torch.randperm(sequences + 1, generator=random)[:sequences]
    memory = weights_of(random, sequences + 1, layers * heads, blocks + 2)
    known = torch.randint(0, 4 * blocks, (sequences,), generator=random, dtype=torch.int32)
    lists = torch.rand(layers, sequences, kv_heads, blocks, generator=random).argsort(-1).int()
    counts = torch.randint(0, blocks + 1, (layers, sequences, kv_heads), generator=random, dtype=torch.int32)
    got = keep_unread(*(x.to(DEVICE) for x in (memory, places, known, lists, counts)), blocks, 4, backend).cpu()
    wanted = memory[places][..., :blocks].view(sequences, layers, heads, blocks).clone()
    for sequence in range(sequences):
        wanted[sequence, ..., int(known[sequence]) // 4 :] = 0
        for layer in range(layers):
            for head in range(heads):
                read = lists[layer, sequence, head // group, : counts[layer, sequence, head // group]]
                wanted[sequence, layer, head, read.long()] = 0
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 5), st.booleans())
def test_blocks_that_are_read_are_counted(backend: str, sizes: tuple[int, ...], passes: int, dense: bool) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    layers, sequences, kv_heads, _, blocks, seed = sizes
    random = torch.Generator().manual_seed(seed)
    first, later = torch.randint(
        0, blocks + 1, (2, layers, sequences, kv_heads), generator=random, dtype=torch.int32
    ).unbind()
    lengths = torch.randint(0, 4 * blocks + 1, (sequences,), generator=random, dtype=torch.int32)
    of_passes = None if dense else first.to(DEVICE), lengths.to(DEVICE), later.to(DEVICE)
    got = count_reads(*of_passes, passes, 4, backend)
    assert got.dtype == torch.int64
    for sequence, count in enumerate(got.tolist()):
        everything = -(-int(lengths[sequence]) // 4) * layers * kv_heads
        before = everything if dense else int(first[:, sequence].sum())
        assert count == before + passes * int(later[:, sequence].sum())


def test_counting_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Behind a first pass that reads lists, and behind a dense one."""
    pytest.importorskip("triton")
    types = dict.fromkeys(("first_ptr", "lengths_ptr", "later_ptr"), "*i32") | {"out_ptr": "*i64"}
    types |= dict.fromkeys(("passes", "sequences"), "i32")
    fixed: dict[str, object] = {"KV_HEADS": 4, "LAYERS": 6, "BLOCK": 16, "LISTS": 32}
    variants = [fixed, fixed | {"first_ptr": None}]
    assert (
        len(compile_for_a_gpu("specahead.kernels.draft_reads", "_count_reads_kernel", types, variants, tmp_path)) == 2
    )
