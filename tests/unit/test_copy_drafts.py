"""Drafts that are copied to the pass that judges them: Triton (on a GPU, or interpreted) and torch against a loop."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.copy_drafts import Drafts, Judged, JudgedRows, copy_drafts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(random: torch.Generator, first: int, stop: int, *sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(first, stop, sizes, generator=random, dtype=dtype)


def drafts_of(random: torch.Generator, count: int, gamma: int, support: int, bitmap: tuple[int, int]) -> Drafts:
    return Drafts(
        tokens=ints(random, 0, 999, count, gamma),
        ids=ints(random, 0, 999, count, gamma, support),
        probs=torch.rand(count, gamma, support, generator=random),
        likeliest=ints(random, 0, 999, count, gamma, 2),
        bitmaps=ints(random, -(1 << 62), 1 << 62, count, *bitmap, dtype=torch.int64),
    )


def rows_of(random: torch.Generator, sequences: int, places: int, gamma: int) -> JudgedRows:
    drafts = ints(random, 0, places, sequences)
    drafts[torch.rand(sequences, generator=random) < 0.3] = -1
    counts = ints(random, 0, gamma + 1, sequences)
    absent = torch.rand(sequences, generator=random) < 0.2
    drafts[absent], counts[absent] = -1, 0
    starts = torch.cat((torch.zeros(1), (counts + 1).masked_fill(absent, 0).cumsum(0))).int()
    return JudgedRows(drafts, ints(random, 0, 3, sequences), counts, starts)


def judged_of(drafts: Drafts, token_ids: Tensor, sampled: bool = True, announces: bool = True) -> Judged:
    """Return what a pass judges, as these drafts, on the device; one that does not sample, or that is told nothing,
    has none of some tensors.
    """
    there = {"tokens": True, "ids": sampled, "probs": sampled, "bitmaps": announces}
    tensors = {name: getattr(drafts, name).clone().to(DEVICE) for name, has in there.items() if has}
    return Judged(token_ids.clone().to(DEVICE), **tensors)


def on_device(tensors: Any) -> Any:
    return type(tensors)(*(tensor.to(DEVICE) for tensor in tensors))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 4)),
    st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 4)),
    st.integers(1, 5),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 999),
)
def test_drafted_tokens_are_those_of_the_rounds(
    backend: str,
    sequences: int,
    of_pass: tuple[int, int, int],
    of_rounds: tuple[int, int, int],
    bitmap_rows: int,
    has: tuple[bool, bool],
    seed: int,
) -> None:
    """Passes and rounds may have other numbers of tokens, of a support's entries, and of words."""
    if backend == "triton":
        pytest.importorskip("triton")
    random, places = torch.Generator().manual_seed(seed), sequences + 1
    drafted, left = (
        drafts_of(random, count, gamma, support, (bitmap_rows, words))
        for count, (gamma, support, words) in ((sequences, of_pass), (places, of_rounds))
    )
    rows = rows_of(random, sequences, places, of_pass[0])
    token_ids = ints(random, 0, 999, int(rows.starts[-1]) + int(ints(random, 0, 3, 1)), dtype=torch.int64)
    ours = judged_of(drafted, token_ids, *has)
    copy_drafts(on_device(rows), ours, on_device(left), backend)

    support, words = min(of_pass[1], of_rounds[1]), min(of_pass[2], of_rounds[2])
    for i, place in enumerate(rows.drafts.tolist()):
        if place < 0:
            continue
        drafted.bitmaps[i, :, :words] = left.bitmaps[place, :, :words]
        held = int(rows.held[i])
        for token in range(held, min(of_pass[0], held + of_rounds[0])):
            drafted.tokens[i, token] = left.tokens[place, token - held]
            for theirs, given_ in ((drafted.ids, left.ids), (drafted.probs, left.probs)):
                theirs[i, token, :support] = given_[place, token - held, :support]
        first, count = int(rows.starts[i]) + 1, int(rows.counts[i])
        token_ids[first : first + count] = drafted.tokens[i, :count]
    assert torch.equal(ours.token_ids.cpu(), token_ids)
    for name in ("tokens", "ids", "probs", "bitmaps"):
        tensor = getattr(ours, name)
        assert tensor is None or torch.equal(tensor.cpu(), getattr(drafted, name)), name


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 999))
def test_alternatives_are_the_likeliest_tokens_that_were_not_drafted(
    backend: str, sequences: int, gamma: int, most: int, seed: int
) -> None:
    """Some sequences have fewer of them than drafted tokens, some none; they run behind the drafted tokens."""
    if backend == "triton":
        pytest.importorskip("triton")
    random, places = torch.Generator().manual_seed(seed), sequences + 1
    drafted, left = (drafts_of(random, count, gamma, 1, (1, 1)) for count in (sequences, places))
    likeliest = left.likeliest
    likeliest[:] = ints(random, 0, 3, places, gamma, 2)
    likeliest[..., 1] = likeliest[..., 0] + 1
    left.tokens[:] = likeliest[..., 0] + ints(random, 0, 3, places, gamma)
    rows = rows_of(random, sequences, places, gamma)
    rows.held[:] = 0
    beside = torch.minimum(rows.counts, ints(random, 0, most + 1, sequences)).clamp(max=most)
    beside[rows.drafts < 0] = 0
    runs = (rows.starts.diff() + beside).cumsum(0)
    rows = JudgedRows(rows.drafts, rows.held, rows.counts, torch.cat((torch.zeros(1), runs)).int())
    token_ids = torch.zeros(int(rows.starts[-1]) + 2, dtype=torch.int64)
    others = torch.full((sequences, most), -1, dtype=torch.int32, device=DEVICE)
    ours = judged_of(drafted, token_ids, False, False)
    ours = ours._replace(alternatives=others, alternative_counts=beside.to(DEVICE))
    copy_drafts(on_device(rows), ours, on_device(left), backend)
    wanted = torch.full((sequences, most), -1, dtype=torch.int32)
    for i, place in enumerate(rows.drafts.tolist()):
        if place < 0:
            continue
        first, count = int(rows.starts[i]) + 1, int(rows.counts[i])
        for at in range(int(beside[i])):
            one, other = likeliest[place, at].tolist()
            wanted[i, at] = one if one != left.tokens[place, at] else other
            token_ids[first + count + at] = wanted[i, at]
        token_ids[first : first + count] = left.tokens[place, :count]
    chains = torch.ones(len(token_ids), dtype=torch.bool)
    for i, place in enumerate(rows.drafts.tolist()):
        chains[int(rows.starts[i]) : int(rows.starts[i + 1])] = place >= 0
    assert torch.equal(ours.token_ids.cpu()[chains], token_ids[chains])
    assert torch.equal(others.cpu(), wanted)


def test_large_announcements_take_several_programs() -> None:
    """Supports need fewer programs than these, and another pass needs more."""
    pytest.importorskip("triton")
    for bitmap, support in (((40, 70), 3), ((2, 1), 900)):
        random = torch.Generator().manual_seed(support)
        drafted, left = (drafts_of(random, 2, 4, support, bitmap) for _ in range(2))
        rows = JudgedRows(*(torch.tensor(each, dtype=torch.int32) for each in ([1, -1], [0, 0], [4, 4], [0, 5, 10])))
        results = []
        for backend in ("triton", "torch"):
            ours = judged_of(drafted, torch.zeros(12, dtype=torch.int64))
            copy_drafts(on_device(rows), ours, on_device(left), backend)
            results.append([tensor for tensor in ours if tensor is not None])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert torch.equal(results[0][4][0].cpu(), left.bitmaps[1])
