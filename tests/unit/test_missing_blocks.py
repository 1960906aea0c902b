"""Counting of blocks that are not hot, on both backends, against its definition."""

from itertools import product

import pytest
import torch

from specahead.kernels.residency import ListedBlocks, count_missing_blocks, empty_tables

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, SEQUENCES, KV_HEADS = 2, 3, 2


def case(seed: int, width: int, per_block: int, device: str) -> dict[str, torch.Tensor]:
    """Ragged lists, empty ones too; the table of the last sequence ends within a block."""
    generator = torch.Generator().manual_seed(seed)
    pages = 3 * width * per_block
    shape = LAYERS, SEQUENCES, KV_HEADS
    order = torch.rand(*shape, 2 * width, generator=generator).argsort(-1)[..., :width]
    table_width = 2 * width * per_block - (per_block - 1)
    return {
        "line_of": torch.randint(-1, 2, (LAYERS, pages * KV_HEADS), generator=generator).int().to(device),
        "lists": order.int().contiguous().to(device),
        "counts": torch.randint(0, width + 1, shape, generator=generator).int().to(device),
        "page_tables": torch.randint(0, pages, (SEQUENCES, table_width), generator=generator).int().to(device),
    }


def by_hand(given: dict[str, torch.Tensor], per_block: int) -> list[int]:
    """Of each sequence."""
    totals = [0] * SEQUENCES
    for layer, sequence, head in product(range(LAYERS), range(SEQUENCES), range(KV_HEADS)):
        count = int(given["counts"][layer, sequence, head])
        for block in given["lists"][layer, sequence, head, :count].tolist():
            table = given["page_tables"][sequence].tolist()[block * per_block : (block + 1) * per_block]
            totals[sequence] += any(given["line_of"][layer, page * KV_HEADS + head] < 0 for page in table)
    return totals


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_missing_blocks(per_block: int, backend: str) -> None:
    given = case(per_block, 40, per_block, DEVICE)
    before = {name: value.clone() for name, value in given.items()}
    line_of, lists, counts, page_tables = given.values()
    tables = empty_tables(LAYERS, line_of.shape[1], 1, DEVICE)._replace(line_of=line_of)
    missing = count_missing_blocks(tables, ListedBlocks(lists, counts, page_tables, KV_HEADS, per_block), backend)
    totals = by_hand({name: value.cpu() for name, value in given.items()}, per_block)
    assert missing.tolist() == totals
    assert 0 < sum(totals) < int(given["counts"].sum())
    assert all(torch.equal(value, before[name]) for name, value in given.items())
