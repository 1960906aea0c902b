"""The kernels around a shared budget: Triton (on a GPU, or interpreted) against the torch references."""

import pytest
import torch
from torch import Tensor

from kernels.shared_budget import remember_weights, score_blocks

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


@pytest.mark.parametrize(("groups", "rows", "n"), SHAPES)
def test_scores(groups: int, rows: int, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**63), 2**63 - 1, (groups, rows, -(-n // 64)), generator=generator)
    memory = torch.rand(groups, rows, n, generator=generator)
    importance = torch.rand(rows, generator=generator)
    arguments = (words, memory, importance, *ragged(groups, n, generator))
    forced, scores = score_blocks(*arguments)
    got_forced, got = score_blocks(*(x.to(DEVICE) for x in arguments), backend="triton")
    assert torch.equal(got_forced.cpu(), forced)
    torch.testing.assert_close(got.cpu(), scores)
    first, last, blocks = arguments[3:]
    for group in range(groups):  # the reference itself, bit by bit
        for row in range(rows):
            for column in range(min(n, 130)):
                bit = (int(words[group, row, column // 64]) >> (column % 64)) & 1
                wanted = column < blocks[group] and (bit or not first[group] <= column < last[group])
                assert bool(forced[group, row, column]) == bool(wanted)
                if wanted or column >= blocks[group]:
                    assert scores[group, row, column] == 0


@pytest.mark.parametrize(("groups", "rows", "n"), SHAPES)
def test_memory(groups: int, rows: int, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    width = n + 3
    memory = torch.rand(groups, rows, n, generator=generator)
    counts = torch.randint(0, n + 1, (groups, rows), generator=generator).int()
    lists = torch.zeros(groups, rows, width, dtype=torch.int32)
    for group in range(groups):
        for row in range(rows):
            count = int(counts[group, row])
            lists[group, row, :count] = torch.randperm(n, generator=generator)[:count].sort().values
    weights = torch.rand(groups, rows, width, generator=generator)
    _, _, blocks = ragged(groups, n, generator)
    wanted, got = memory.clone(), memory.clone().to(DEVICE)
    inner = rows if rows % 2 else 2
    laid_out = [x.unflatten(1, (-1, inner)).transpose(0, 1).contiguous() for x in (lists, counts, weights)]
    remember_weights(wanted, *laid_out, blocks, 0.8)
    moved = (x.to(DEVICE) for x in (*laid_out, blocks))
    remember_weights(got, *moved, 0.8, backend="triton")
    torch.testing.assert_close(got.cpu(), wanted)
    dense = torch.zeros(groups, rows, n)
    for group in range(groups):
        for row in range(rows):
            at = lists[group, row, : counts[group, row]].long()
            dense[group, row, at] = weights[group, row, : counts[group, row]]
            dense[group, row, blocks[group] :] = 0
    inside = torch.arange(n) < blocks[:, None, None]
    torch.testing.assert_close(wanted, torch.maximum(dense, (memory * 0.8).where(inside, 0.0)))
