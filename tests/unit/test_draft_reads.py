"""What a draft reads by its own weights: Triton (on a GPU, or interpreted) against torch, and torch against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.draft_reads import keep_unread, score_own_blocks

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
