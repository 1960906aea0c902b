"""A pass takes what rounds have left: Triton (on a GPU, or interpreted) and torch against a loop."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.copy_drafts import Beside, Drafted, PassRows, take_drafted
from tests.compiling import compile_for_a_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(random: torch.Generator, first: int, stop: int, *sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(first, stop, sizes, generator=random, dtype=dtype)


def drafted_of(random: torch.Generator, count: int, gamma: int, support: int, bitmap: tuple[int, int]) -> Drafted:
    bitmaps = ints(random, -(1 << 62), 1 << 62, count, *bitmap, dtype=torch.int64)
    ids = ints(random, 0, 999, count, gamma, support)
    return Drafted(
        ints(random, 0, 999, count, gamma), ids, torch.rand(count, gamma, support, generator=random), bitmaps
    )


def rows_of(random: torch.Generator, sequences: int, places: int, gamma: int) -> PassRows:
    behind = ints(random, 0, places, sequences)
    behind[torch.rand(sequences, generator=random) < 0.3] = -1
    counts = ints(random, 0, gamma + 1, sequences)
    absent = torch.rand(sequences, generator=random) < 0.2
    behind[absent], counts[absent] = -1, 0
    starts = torch.cat((torch.zeros(1), (counts + 1).masked_fill(absent, 0).cumsum(0))).int()
    return PassRows(behind, ints(random, 0, 3, sequences), counts, starts)


def kept(drafted: Drafted, device: str, sampled: bool = True, announces: bool = True) -> Drafted:
    """Return a copy on a device, without what there is not in a pass that does not sample, or is told nothing."""
    there = {"tokens": True, "ids": sampled, "probs": sampled, "bitmaps": announces}
    return Drafted(*(getattr(drafted, name).clone().to(device) if has else None for name, has in there.items()))


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
        drafted_of(random, count, gamma, support, (bitmap_rows, words))
        for count, (gamma, support, words) in ((sequences, of_pass), (places, of_rounds))
    )
    rows = rows_of(random, sequences, places, of_pass[0])
    token_ids = ints(random, 0, 999, int(rows.starts[-1]) + int(ints(random, 0, 3, 1)), dtype=torch.int64)
    ours, ours_left, tokens = kept(drafted, DEVICE, *has), kept(left, DEVICE), token_ids.clone().to(DEVICE)
    on_device = PassRows(*(tensor.to(DEVICE) for tensor in vars(rows).values()))
    take_drafted(on_device, tokens, ours, ours_left, None, backend)

    support, words = min(of_pass[1], of_rounds[1]), min(of_pass[2], of_rounds[2])
    for i, place in enumerate(rows.behind.tolist()):
        if place < 0:
            continue
        drafted.bitmaps[i, :, :words] = left.bitmaps[place, :, :words]  # type: ignore[index]
        held = int(rows.held[i])
        for token in range(held, min(of_pass[0], held + of_rounds[0])):
            drafted.tokens[i, token] = left.tokens[place, token - held]
            for theirs, given_ in ((drafted.ids, left.ids), (drafted.probs, left.probs)):
                theirs[i, token, :support] = given_[place, token - held, :support]  # type: ignore[index]
        first, count = int(rows.starts[i]) + 1, int(rows.counts[i])
        token_ids[first : first + count] = drafted.tokens[i, :count]
    assert torch.equal(tokens.cpu(), token_ids)
    for name, tensor in vars(ours).items():
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
    drafted, left = (drafted_of(random, count, gamma, 1, (1, 1)) for count in (sequences, places))
    likeliest = ints(random, 0, 3, places, gamma, 2)
    likeliest[..., 1] = likeliest[..., 0] + 1
    left.tokens[:] = likeliest[..., 0] + ints(random, 0, 3, places, gamma)
    rows = rows_of(random, sequences, places, gamma)
    rows.held[:] = 0
    beside = torch.minimum(rows.counts, ints(random, 0, most + 1, sequences)).clamp(max=most)
    beside[rows.behind < 0] = 0
    runs = (rows.starts.diff() + beside).cumsum(0)
    rows = PassRows(rows.behind, rows.held, rows.counts, torch.cat((torch.zeros(1), runs)).int())
    token_ids = torch.zeros(int(rows.starts[-1]) + 2, dtype=torch.int64)
    ours, tokens = kept(drafted, DEVICE, False, False), token_ids.clone().to(DEVICE)
    others = torch.full((sequences, most), -1, dtype=torch.int32, device=DEVICE)
    on_device = PassRows(*(tensor.to(DEVICE) for tensor in vars(rows).values()))
    taken = Beside(others, beside.to(DEVICE), likeliest.to(DEVICE))
    take_drafted(on_device, tokens, ours, kept(left, DEVICE), taken, backend)
    wanted = torch.full((sequences, most), -1, dtype=torch.int32)
    for i, place in enumerate(rows.behind.tolist()):
        if place < 0:
            continue
        first, count = int(rows.starts[i]) + 1, int(rows.counts[i])
        for at in range(int(beside[i])):
            one, other = likeliest[place, at].tolist()
            wanted[i, at] = one if one != left.tokens[place, at] else other
            token_ids[first + count + at] = wanted[i, at]
        token_ids[first : first + count] = left.tokens[place, :count]
    chains = torch.ones(len(token_ids), dtype=torch.bool)
    for i, place in enumerate(rows.behind.tolist()):
        chains[int(rows.starts[i]) : int(rows.starts[i + 1])] = place >= 0
    assert torch.equal(tokens.cpu()[chains], token_ids[chains])
    assert torch.equal(others.cpu(), wanted)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_there_is_no_room_for_is_left_out(backend: str) -> None:
    """Rounds have more tokens, larger supports and longer bitmaps than the pass; what lies behind stays as it is."""
    if backend == "triton":
        pytest.importorskip("triton")
    random = torch.Generator().manual_seed(1)
    drafted, left = drafted_of(random, 2, 3, 2, (2, 1)), drafted_of(random, 1, 5, 4, (2, 3))
    rows = PassRows(*(torch.tensor(each, dtype=torch.int32) for each in ([0, -1], [1, 0], [3, 3], [0, 4, 8])))
    ours, tokens = kept(drafted, DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    rows = PassRows(*(tensor.to(DEVICE) for tensor in vars(rows).values()))
    take_drafted(rows, tokens, ours, kept(left, DEVICE), None, backend)
    assert tokens.tolist() == [0, int(drafted.tokens[0, 0]), *left.tokens[0, :2].tolist(), 0, 0, 0, 0]
    for name, tensor in vars(ours).items():
        given_, of_round = getattr(drafted, name), getattr(left, name)
        assert torch.equal(tensor[1].cpu(), given_[1]), name
        if name != "bitmaps":
            part = of_round[0, :2] if name == "tokens" else of_round[0, :2, :2]
            assert torch.equal(tensor[0].cpu(), torch.cat((given_[0, :1], part))), name
    assert ours.bitmaps is not None and left.bitmaps is not None
    assert torch.equal(ours.bitmaps[0].cpu(), left.bitmaps[0, :, :1])


def test_large_announcements_take_several_programs() -> None:
    """Of which supports need fewer, and another pass more."""
    pytest.importorskip("triton")
    for bitmap, support in (((40, 70), 3), ((2, 1), 900)):
        random = torch.Generator().manual_seed(support)
        drafted, left = (drafted_of(random, 2, 4, support, bitmap) for _ in range(2))
        rows = PassRows(*(torch.tensor(each, dtype=torch.int32) for each in ([1, -1], [0, 0], [4, 4], [0, 5, 10])))
        rows = PassRows(*(tensor.to(DEVICE) for tensor in vars(rows).values()))
        results = []
        for backend in ("triton", "torch"):
            ours, tokens = kept(drafted, DEVICE), torch.zeros(12, dtype=torch.int64, device=DEVICE)
            take_drafted(rows, tokens, ours, kept(left, DEVICE), None, backend)
            results.append([tokens, *vars(ours).values()])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert torch.equal(results[0][4][0].cpu(), left.bitmaps[1])  # type: ignore[index]


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    """With supports, bitmaps and alternatives, and without all three."""
    pytest.importorskip("triton")
    fixed: dict[str, object] = {"TOKENS": 4, "CHUNK": 1024}
    of_rows = "behind", "held", "counts", "starts", "tokens", "left_tokens"
    types = dict.fromkeys((f"{name}_ptr" for name in of_rows), "*i32") | {"token_ids_ptr": "*i64"}
    numbers = (
        "gamma",
        "left_gamma",
        "support",
        "left_support",
        "entries",
        "bitmap_rows",
        "words",
        "left_words",
        "both",
        "most_beside",
    )
    types |= dict.fromkeys(numbers, "i32")
    optional = {"ids_ptr": "*i32", "left_ids_ptr": "*i32", "probs_ptr": "*fp32", "left_probs_ptr": "*fp32"}
    optional |= {"bitmaps_ptr": "*i64", "left_bitmaps_ptr": "*i64"}
    optional |= dict.fromkeys(("beside_ptr", "beside_counts_ptr", "likeliest_ptr"), "*i32")
    variants = [fixed, fixed | dict.fromkeys(optional)]
    assert (
        len(
            compile_for_a_gpu(
                "specahead.kernels.copy_drafts", "_take_drafted_kernel", types | optional, variants, tmp_path
            )
        )
        == 2
    )
