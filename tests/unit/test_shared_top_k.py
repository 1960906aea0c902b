"""One budget over several rows: Triton (on a GPU, or interpreted) and the torch reference against plain sorting."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.shared_top_k import mark_top_k_over_all, select_top_k_over_all

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scores_of(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "zeros":
        return torch.zeros(shape)
    values = torch.rand(shape, generator=generator)
    if kind == "ties":
        return (values * 3).round() / 8
    if kind == "peaked":
        return values.pow(30)
    if kind == "tiny":  # denormal and ordinary ones
        return values * torch.where(values < 0.5, 1e-41, 1e-3)
    return values.where(values > 0.7, 0.0)


def wanted_sets(scores: Tensor, count: int, forced: Tensor | None) -> list[list[int]]:
    """Of one group, by sorting (-score, flat index)."""
    flat = scores.flatten().numpy()
    best = [i for i in np.lexsort((np.arange(len(flat)), -flat)) if flat[i] > 0][: max(0, count)]
    rows, n = scores.shape
    sets: list[set[int]] = [set() for _ in range(rows)]
    for i in best:
        sets[i // n].add(int(i % n))
    if forced is not None:
        for row, column in forced.nonzero().tolist():
            sets[row].add(column)
    return [sorted(chosen) for chosen in sets]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["zeros", "ties", "peaked", "tiny", "sparse"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 70), (3, 5, 1300)])
def test_lists_and_bits(shape: tuple[int, int, int], kind: str, backend: str) -> None:
    groups, rows, n = shape
    generator = torch.Generator().manual_seed(n)
    scores = scores_of(kind, shape, generator)
    forced = (torch.rand(shape, generator=generator) < 0.1).to(torch.uint8)
    counts = torch.tensor([rows * n + 7, 0, rows * n // 3][-groups:], dtype=torch.int32)
    for mask in (None, forced):
        free = scores if mask is None else scores.masked_fill(mask.bool(), 0)
        given = None if mask is None else mask.to(DEVICE)
        lists, taken = select_top_k_over_all(free.to(DEVICE), counts.to(DEVICE), given, backend)
        for group in range(groups):
            wanted = wanted_sets(free[group], int(counts[group]), None if mask is None else mask[group])
            got = [
                row[:count].tolist()
                for row, count in zip(lists[group].cpu(), taken[group].tolist(), strict=True)
            ]
            assert got == wanted
        outer, counted = select_top_k_over_all(free.to(DEVICE), counts.to(DEVICE), given, backend, inner=rows)
        assert outer.shape == (1, groups, rows, n)
        assert torch.equal(counted[0], taken)
        split = select_top_k_over_all(free.to(DEVICE), counts.to(DEVICE), given, backend, inner=1)[1]
        assert torch.equal(split[:, :, 0].T, taken)
    words = mark_top_k_over_all(scores.to(DEVICE), counts.to(DEVICE), backend).cpu().numpy().view(np.uint64)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    for group in range(groups):
        wanted = wanted_sets(scores[group], int(counts[group]), None)
        assert [np.flatnonzero(row).tolist() for row in bits[group]] == wanted
