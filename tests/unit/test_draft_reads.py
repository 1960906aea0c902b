"""What a draft reads by its own weights: Triton (on a GPU, or interpreted) against torch, and torch against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.kernels.draft_reads import score_own_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(0, 99)
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 3), st.integers(0, 5))
def test_scores(backend: str, sizes: tuple[int, ...], first: int, newest: int) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    layers, sequences, kv_heads, group, blocks, seed = sizes
    size, share, random = 4, 0.3, torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 1000, (sequences, layers * kv_heads * group, blocks), generator=random).float()
    lengths = torch.randint(0, blocks * size - 1, (sequences,), generator=random, dtype=torch.int32)
    lengths[torch.rand(sequences, generator=random) < 0.2] = 0
    ends = torch.minimum(lengths + 5, torch.tensor(blocks * size, dtype=torch.int32))
    scores, valid, counts = score_own_blocks(
        *(tensor.to(DEVICE) for tensor in (weights, lengths, ends)),
        (layers, kv_heads, blocks, size),
        (first, newest),
        share,
        backend,
    )
    scores = scores.view(layers, sequences, kv_heads, blocks)
    for sequence in range(sequences):
        length, there = int(lengths[sequence]), -(-int(ends[sequence]) // size) if lengths[sequence] else 0
        recent = -(-length // size) - newest
        anyway = {block for block in range(blocks) if block < first or block >= recent}
        wanted = max(int(torch.tensor(there) * share), len(anyway & set(range(there))))
        own = weights[sequence].view(layers, kv_heads, group, blocks).sum(2)  # sums of these are exact
        own[..., sorted(anyway)] = torch.inf
        assert torch.equal(scores[:, sequence].cpu(), own)
        assert (valid.view(layers, sequences, kv_heads)[:, sequence] == there).all()
        assert (counts.view(layers, sequences, kv_heads)[:, sequence] == wanted).all()
