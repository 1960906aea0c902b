"""Counting and leaving out of late blocks: the reference against its definition, and Triton against the reference."""

import pytest
import torch

from kernels.late_blocks import count_late_blocks

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
        "slot_of": torch.randint(-1, 2, (LAYERS, pages * KV_HEADS), generator=generator).int().to(device),
        "lists": order.int().contiguous().to(device),
        "counts": torch.randint(0, width + 1, shape, generator=generator).int().to(device),
        "page_tables": torch.randint(0, pages, (SEQUENCES, table_width), generator=generator)
        .int()
        .to(device),
        "announced": (torch.rand(SEQUENCES, LAYERS * KV_HEADS, 2 * width, generator=generator) < 0.5)
        .to(torch.uint8)
        .to(device),
    }


def by_hand(given: dict[str, torch.Tensor], per_block: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """[cold, late] of each sequence, and the entries of each list that stay."""
    totals = [[0, 0] for _ in range(SEQUENCES)]
    staying = []
    for layer in range(LAYERS):
        for sequence in range(SEQUENCES):
            for head in range(KV_HEADS):
                count = int(given["counts"][layer, sequence, head])
                stays = []
                for block in given["lists"][layer, sequence, head, :count].tolist():
                    table = given["page_tables"][sequence].tolist()[
                        block * per_block : (block + 1) * per_block
                    ]
                    cold = any(given["slot_of"][layer, page * KV_HEADS + head] < 0 for page in table)
                    late = cold and not given["announced"][sequence, layer * KV_HEADS + head, block]
                    totals[sequence][0] += cold
                    totals[sequence][1] += late
                    stays += [] if late else [block]
                staying.append(stays)
    return totals, staying


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_late_blocks(per_block: int, leave_out: bool, backend: str) -> None:
    given = case(per_block, 40, per_block, DEVICE)
    totals, staying = by_hand({name: value.cpu() for name, value in given.items()}, per_block)
    before = given["lists"].clone(), given["counts"].clone()
    cold, late = count_late_blocks(
        given["slot_of"],
        given["lists"],
        given["counts"],
        given["page_tables"],
        KV_HEADS,
        per_block,
        given["announced"],
        leave_out,
        backend,
    )
    assert [list(pair) for pair in zip(cold.tolist(), late.tolist(), strict=True)] == totals
    assert 0 < sum(late for _, late in totals) < sum(cold for cold, _ in totals)
    if leave_out:
        lists, counts = given["lists"].flatten(0, 2).tolist(), given["counts"].flatten().tolist()
        assert [row[:count] for row, count in zip(lists, counts, strict=True)] == staying
    else:
        assert torch.equal(given["lists"], before[0]) and torch.equal(given["counts"], before[1])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_all_announced_is_never_late(backend: str) -> None:
    given = case(5, 20, 1, DEVICE)
    tables = given["slot_of"], given["lists"], given["counts"], given["page_tables"]
    cold, late = count_late_blocks(*tables, KV_HEADS, 1, None, True, backend)
    assert int(cold.sum()) > 0 and not late.any()
