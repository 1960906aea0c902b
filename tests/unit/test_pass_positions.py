"""Where the tokens of a round's passes stand: Triton (on a GPU, or interpreted) and torch against a loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.kernels.pass_positions import Branches, pass_positions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, PAGES = 4, 8


def branches_of(random: torch.Generator, sequences: int, each: int, passes: int) -> Branches:
    """Return branches of sequences of which some have no tokens; some branches repeat others, and keep no KV."""
    tables = torch.randint(0, 1000, (sequences, PAGES), generator=random, dtype=torch.int32)
    room = PAGE * PAGES - passes
    before, own = torch.randint(1, room, (2, sequences * each), generator=random, dtype=torch.int32).unbind()
    kept = (torch.rand(sequences * each, generator=random) < 0.7).int()
    absent = (torch.rand(sequences, generator=random) < 0.3).repeat_interleave(each)
    before[absent], own[absent], kept[absent] = 0, 0, 0
    if each == 1:
        own, kept = before, before
    return Branches(before, own, kept, tables, each)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 9), st.integers(0, 999))
def test_places_of_all_passes(backend: str, sequences: int, each: int, passes: int, seed: int) -> None:
    """A round of one pass has none that runs one token of each branch."""
    if backend == "triton":
        pytest.importorskip("triton")
    branches = branches_of(torch.Generator().manual_seed(seed), sequences, each, passes)
    before, own, kept, tables = (tensor for tensor in vars(branches).values() if isinstance(tensor, torch.Tensor))
    places = pass_positions(
        Branches(*(tensor.to(DEVICE) for tensor in (before, own, kept, tables)), each), passes, PAGE, backend
    )
    assert places.starts.tolist() == [each * i for i in range(sequences + 1)]
    assert (places.visible is None) == (each == 1)
    assert len(places.positions) == len(places.slots) == len(places.ends) == passes
    for index in range(passes):
        for row in range(sequences * each):
            own_first, own_last = int(own[row]), int(own[row]) + index
            slot = int(tables[row // each, own_last // PAGE]) * PAGE + own_last % PAGE
            there = int(before[row]) > 0
            assert places.positions[index, row] == (int(before[row]) + index if there else 0)
            assert places.slots[index, row] == (slot if kept[row] else -1)
            assert places.ends[index, row] == (own_last + 1 if there else 0)
            if places.visible is not None:
                seen = [int(before[row]), own_first, own_last + 1 if there else 0]
                assert places.visible[index, row].tolist() == seen
    of_rows = places.starts, places.ends, places.positions, places.slots
    assert [tensor.dtype for tensor in of_rows] == [torch.int32] * 2 + [torch.int64] * 2
