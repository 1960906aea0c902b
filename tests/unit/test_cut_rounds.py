"""Rounds that are cut behind a step's verdicts: Triton (on a GPU, or interpreted) and torch against a loop."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.rollback_rows import BEGINNING, RoundsRows, StepsVerdicts, cut_rounds
from tests.compiling import compile_for_a_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, PAGES = 16, 4


def ints(random: torch.Generator, first: int, stop: int, *sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(first, stop, sizes, generator=random, dtype=dtype)


def verdicts_of(random: torch.Generator, sequences: int, gamma: int) -> StepsVerdicts:
    """Of a step that accepts more than it judges, as well: such sequences are as the host gave them. Of a third of the
    places the last accepted token is an alternative.
    """
    behind = torch.randperm(sequences + 2, generator=random)[:sequences].int()
    behind[torch.rand(sequences, generator=random) < 0.3] = -1
    accepted, following = (ints(random, 0, most, sequences + 2) for most in (gamma + 2, 1000))
    alternative = ints(random, 0, 1000, sequences + 2).masked_fill(
        torch.rand(sequences + 2, generator=random) < 0.6, -1
    )
    return StepsVerdicts(behind, ints(random, 0, gamma + 1, sequences), accepted, following, alternative)


def rows_of(random: torch.Generator, behind: Tensor, gamma: int) -> RoundsRows:
    """Return rows of sequences that are behind a step, of others, and some of none."""
    counts = torch.where(behind >= 0, BEGINNING, ints(random, 0, 5, len(behind)))
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    rows = int(starts[-1]) + int(ints(random, 0, 4, 1))
    tables = ints(random, 0, 1000, len(behind), PAGES)
    token_ids, positions, slots = (
        ints(random, *limits, rows, dtype=torch.int64) for limits in ((0, 999), (gamma, PAGE * PAGES), (-1, 9999))
    )
    return RoundsRows(starts, ints(random, gamma, 200, len(behind)), tables, token_ids, positions, slots)


def pairs_of(
    random: torch.Generator, sequences: int, gamma: int, passes: int, announces: bool
) -> list[tuple[Tensor, Tensor]]:
    sizes = [(sequences,), (passes, sequences), (3, sequences), (sequences,)][: 4 if announces else 3]
    pairs = [(ints(random, 0, 999, *size), ints(random, 0, 999, gamma, *size)) for size in sizes]
    dtypes = torch.int64, torch.float64, torch.int32, torch.int32
    return [(now.to(dtype), cut.to(dtype)) for (now, cut), dtype in zip(pairs, dtypes, strict=False)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.integers(0, 999))
def test_rounds_are_cut_by_what_is_rejected(
    backend: str, sequences: int, gamma: int, passes: int, announces: bool, seed: int
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    random = torch.Generator().manual_seed(seed)
    left = verdicts_of(random, sequences, gamma)
    rows = rows_of(random, left.behind, gamma)
    pairs = pairs_of(random, sequences, gamma, passes, announces)
    on_device = [type(each)(*(tensor.to(DEVICE) for tensor in vars(each).values())) for each in (left, rows)]
    before = [tensor.clone() for each in on_device for tensor in vars(each).values()]
    cut = cut_rounds(*on_device, [(now.to(DEVICE), of_cut.to(DEVICE)) for now, of_cut in pairs], PAGE, backend)  # type: ignore[arg-type]
    assert all(
        torch.equal(*pair) for pair in zip(before, (x for y in on_device for x in vars(y).values()), strict=True)
    )

    wanted = {name: tensor.clone() for name, tensor in vars(rows).items()}
    numbers = [now.clone() for now, _ in pairs]
    rejected, began = torch.zeros(sequences, dtype=torch.int64), torch.zeros(3, sequences, dtype=torch.int32)
    for i, behind in enumerate(left.behind.tolist()):
        accepted, following = int(left.accepted[max(0, behind)]), int(left.following[max(0, behind)])
        alternative = int(left.alternative[max(0, behind)])
        began[:, i] = torch.tensor([accepted, following, alternative])
        if behind < 0:
            continue
        rejected[i] = count = max(0, int(left.judged[i]) - accepted)
        for number, (_, of_cut) in zip(numbers, pairs, strict=True):
            if count:
                number[..., i] = of_cut[count - 1, ..., i]
        if alternative >= 0:
            numbers[0][i] = alternative
        wanted["lengths"][i] -= count
        first = int(rows.starts[i])
        wanted["token_ids"][first], wanted["token_ids"][first + 1] = numbers[0][i], following
        for row in range(first, first + BEGINNING):
            position = int(rows.positions[row]) - count
            wanted["positions"][row] = position
            wanted["slots"][row] = int(rows.tables[i, position // PAGE]) * PAGE + position % PAGE
    expected = [rejected, began, *(wanted[name] for name in ("lengths", "token_ids", "positions", "slots")), *numbers]
    got = [cut.rejected, cut.began, cut.lengths, cut.token_ids, cut.positions, cut.slots, *cut.numbers]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)


def test_a_sequence_may_have_more_rows_and_a_round_more_passes_than_a_program_takes_at_once() -> None:
    pytest.importorskip("triton")
    random = torch.Generator().manual_seed(1)
    left = verdicts_of(random, 3, 4)
    left.behind[:] = torch.tensor([1, -1, 0])
    starts = torch.tensor([0, 2, 302, 304], dtype=torch.int32)
    of_rows = (ints(random, 4, PAGE * PAGES, 600, dtype=torch.int64) for _ in range(3))
    rows = RoundsRows(starts, ints(random, 4, 200, 3), ints(random, 0, 1000, 3, PAGES), *of_rows)
    pairs = pairs_of(random, 3, 4, 300, True)
    on_device = [type(each)(*(tensor.to(DEVICE) for tensor in vars(each).values())) for each in (left, rows)]
    moved = [(now.to(DEVICE), cut.to(DEVICE)) for now, cut in pairs]
    ours, theirs = (cut_rounds(*on_device, moved, PAGE, backend) for backend in ("triton", "torch"))  # type: ignore[arg-type]
    for name in ("rejected", "began", "lengths", "token_ids", "positions", "slots"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert all(torch.equal(*pair) for pair in zip(ours.numbers, theirs.numbers, strict=True))


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    """With four pairs, and with three."""
    pytest.importorskip("triton")
    of_sequences = (
        "behind",
        "judged",
        "accepted",
        "following",
        "alternative",
        "starts",
        "lengths",
        "tables",
        "began",
        "new_lengths",
    )
    of_rows = "token_ids", "positions", "slots"
    types = dict.fromkeys((f"{name}_ptr" for name in of_sequences), "*i32") | {"rejected_ptr": "*i64"}
    types |= dict.fromkeys((f"{new}{name}_ptr" for name in of_rows for new in ("", "new_")), "*i64")
    types |= dict.fromkeys(("sequences", "rows", "pages"), "i32")
    for name, dtype in {"previous": "i64", "second": "fp64", "third": "i32", "fourth": "i32"}.items():
        types |= dict.fromkeys((f"{name}_ptr", f"{name}_cut_ptr", f"new_{name}_ptr"), f"*{dtype}")
        types[f"{name}_count"] = "i32"
    fixed: dict[str, object] = {"BEGINNING": BEGINNING, "PAGE": PAGE, "CHUNK": 128}
    none = dict.fromkeys(("fourth_ptr", "fourth_cut_ptr", "new_fourth_ptr"))
    variants = [fixed, fixed | none]
    assert (
        len(compile_for_a_gpu("specahead.kernels.rollback_rows", "_cut_rounds_kernel", types, variants, tmp_path)) == 2
    )
