"""What a request has placed: kept and counted, in Triton (on a GPU, or interpreted) and torch."""

import pytest
import torch

from kernels import placed_pages
from kernels.placed_pages import count_unread, keep_placed
from kernels.residency import Transfers

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("rows", "capacity", "slots"), [(1, 1, 1), (3, 700, 900), (2, 0, 5)])
def test_what_was_placed(
    rows: int, capacity: int, slots: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full and empty rows; another request does not change what is kept."""
    monkeypatch.setattr(placed_pages, "_CHUNK", 64)
    generator = torch.Generator().manual_seed(capacity)
    pages, counts = (
        torch.randint(0, end, shape, generator=generator, dtype=torch.int32)
        for end, shape in ((10_000, (rows, capacity)), (capacity + 1, (rows,)))
    )
    counts[0] = capacity
    where = torch.stack([torch.randperm(slots, generator=generator)[:capacity] for _ in range(rows)]).int()
    stamps = torch.randint(3, 6, (rows, slots), generator=generator, dtype=torch.int32)
    given = Transfers(*(part.to(DEVICE, copy=True) for part in (pages, where, counts, counts + 1)))
    kept = keep_placed(given, backend)
    for part in (given.pages, given.slots, given.counts, given.unplaced):
        part.zero_()
    assert kept.counts.tolist() == counts.tolist() and kept.unplaced.tolist() == (counts + 1).tolist()
    assert kept.pages.shape == kept.slots.shape == (rows, capacity)
    unread = 0
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(kept.pages[row, :count].cpu(), pages[row, :count])
        assert torch.equal(kept.slots[row, :count].cpu(), where[row, :count])
        unread += int((stamps[row, where[row, :count].long()] == 4).sum())
    assert count_unread(stamps.to(DEVICE), kept, 4, backend).tolist() == [unread]
    assert count_unread(stamps.to(DEVICE), kept, 9, backend).tolist() == [0]
