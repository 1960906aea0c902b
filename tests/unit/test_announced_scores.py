"""Scores by which blocks are announced: Triton (on a GPU, or interpreted) and torch against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.kernels.announced_scores import score_announced

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 150), st.integers(0, 99))
def test_rows_are_blends_of_heads(backend: str, sequences: int, rows: int, width: int, blocks: int, seed: int) -> None:
    """What was announced counts more, nothing outside the limits; a blend may have fewer heads than there is room."""
    if backend == "triton":
        pytest.importorskip("triton")
    random = torch.Generator().manual_seed(seed)
    evidence = torch.rand(sequences, 5, blocks, generator=random)
    heads = torch.stack([torch.randperm(5, generator=random)[:width] for _ in range(rows)]).int()
    weights = torch.rand(rows, width, generator=random).where(torch.rand(rows, width, generator=random) < 0.7, 0.0)
    announced = torch.rand(sequences, rows, -(-blocks // 64) * 64, generator=random) < 0.4
    bits = (announced.view(sequences, rows, -1, 64).long() << torch.arange(64)).sum(3)
    limits = torch.randint(0, blocks + 1, (3, sequences), generator=random, dtype=torch.int32)
    got = score_announced(*(x.to(DEVICE) for x in (evidence, heads, weights, bits, limits)), 1.5, backend).cpu()
    wanted = torch.zeros(sequences, rows, blocks)
    for sequence in range(sequences):
        for row in range(rows):
            blend = sum(weights[row, i] * evidence[sequence, heads[row, i]] for i in range(width))
            wanted[sequence, row] = torch.where(announced[sequence, row, :blocks], blend * 1.5, blend)
        wanted[sequence, :, : limits[0, sequence]] = 0
        wanted[sequence, :, limits[1, sequence] :] = 0
    torch.testing.assert_close(got, wanted)


def test_scores_that_differ_stay_different() -> None:
    """Where many scores are alike, a threshold takes long to find: they must not be rounded to fewer bits."""
    pytest.importorskip("triton")
    evidence = (1 + torch.arange(4000) * 2**-23)[None, None].to(DEVICE)
    blend = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    limits = torch.tensor([[0], [4000], [100]], dtype=torch.int32, device=DEVICE)
    before = torch.zeros(1, 1, 63, dtype=torch.int64, device=DEVICE)
    assert len(score_announced(evidence, *blend, before, limits, 1.0, "triton").unique()) == 4000
