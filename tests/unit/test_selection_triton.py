"""Top-k and nucleus of rows in Triton (on a GPU, or interpreted) against the torch reference and by definition."""

from typing import Literal

import pytest
import torch
from torch import Tensor

import specahead.kernels.selection
from specahead.kernels.selection import select_nucleus, select_top_k

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["uniform", "peaked", "ties", "equal", "zeros", "tiny", "ramp"]
# Of a row, and of what a program holds: the last is too long for one.
SIZES = [(1, 8192), (60, 8192), (128, 8192), (300, 128)]


def weights_of(kind: str, rows: int, n: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    values = torch.rand(rows, n, generator=random)
    return {
        "uniform": values,
        "peaked": (values * 40).exp() / 1e12,  # as attention is: a few hold it all
        "ties": (values * 4).round() / 4,
        "equal": torch.full((rows, n), 0.25),
        "zeros": torch.zeros(rows, n),
        "tiny": values * torch.where(values < 0.5, 1e-41, 1e-3),  # denormal and ordinary ones
        "ramp": torch.arange(n).float().expand(rows, n) + values,  # a sample sees it evenly, a part would not
    }[kind].contiguous()


def lists_of(result: tuple[Tensor, Tensor]) -> list[list[int]]:
    lists, counts = (part.cpu() for part in result)
    assert lists.dtype == counts.dtype == torch.int32
    return [row[:count].tolist() for row, count in zip(lists, counts.tolist(), strict=True)]


def lengths_of(rows: int, n: int, seed: int) -> Tensor:
    valid = torch.randint(0, n + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    valid[0] = n
    return valid


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "chunk"), SIZES)
def test_top_k(n: int, chunk: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specahead.kernels.selection, "CHUNK", chunk)
    rows = 5
    weights, valid = weights_of(kind, rows, n, n), lengths_of(rows, n, n)
    k = torch.tensor([n // 10, n, n // 2, 0, n // 3 + 1])
    wanted = lists_of(select_top_k(weights, valid, k))
    got = select_top_k(weights.to(DEVICE), valid.to(DEVICE), k.to(DEVICE), "triton")
    assert got[0].shape == (rows, n)
    assert lists_of(got) == wanted


@pytest.mark.parametrize("sampled", [0.0, 0.5, 2.0])
def test_a_sample_that_misleads(sampled: float) -> None:
    """What it sees of a row is unlike all else."""
    weights = weights_of("uniform", 1, 300, 3)
    weights[:, ::3] = sampled
    k, size = torch.tensor([40]), torch.tensor([300])
    got = lists_of(select_top_k(weights.to(DEVICE), size.to(DEVICE), k.to(DEVICE), "triton"))
    assert got == lists_of(select_top_k(weights, size, k))
    chosen = lists_of(select_nucleus(weights.to(DEVICE), size.to(DEVICE), 0.7, backend="triton"))[0]
    held, wanted = weights[0, chosen], 0.7 * float(weights.sum())
    assert float(held.sum()) > wanted - 1e-3 > float(held[held > held.min()].sum()) - 2e-3
    assert len(chosen) == int((weights >= held.min()).sum())


@pytest.mark.parametrize("kind", [*KINDS, "mostly zeros", "infinities", "clustered"])
def test_top_k_of_all_lengths_and_counts(kind: str) -> None:
    """None, one, all but one, all, beyond all."""
    n = 1101
    valid = torch.tensor([n, n, n, n, n - 1, 700, 700, 256, 20, 1, 0, n], dtype=torch.int32)
    k = torch.tensor([n // 10, n // 2, 1, 0, n - 2, 70, 701, 255, 7, 1, 5, n], dtype=torch.int32)
    if kind in KINDS:
        weights = weights_of(kind, len(k), n, n)
    else:
        weights = weights_of("uniform", len(k), n, n)
        if kind == "mostly zeros":
            weights[weights < 0.8] = 0
        elif kind == "infinities":
            weights[weights > 0.9] = torch.inf
        else:  # all that is near the threshold in one part of the row
            weights[:, :256] = 0.9 + weights[:, :256] / 1e4
    wanted = lists_of(select_top_k(weights, valid, k))
    got = select_top_k(weights.to(DEVICE), valid.to(DEVICE), k.to(DEVICE), "triton")
    assert lists_of(got) == wanted


@pytest.mark.parametrize("chunk", [8192, 512])
def test_ties_that_are_taken_in_part(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where lists are cut to their width."""
    monkeypatch.setattr(specahead.kernels.selection, "CHUNK", chunk)
    weights = torch.full((3, 600), 0.5)
    weights[:, 100:130] = 0.75
    weights[1, ::7] = 0.25
    weights[2, 400:] = 0.5000001
    k, full = torch.tensor([300, 333, 290]), torch.tensor([600, 600, 600])
    wanted = lists_of(select_top_k(weights, full, k))
    assert lists_of(select_top_k(weights.to(DEVICE), full.to(DEVICE), k.to(DEVICE), "triton")) == wanted
    lists, counts = select_top_k(weights.to(DEVICE), full.to(DEVICE), k.to(DEVICE), "triton", 200)
    assert counts.tolist() == [200] * 3 and lists.tolist() == [row[:200] for row in wanted]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_entry_that_no_sample_sees_holds_the_nucleus(backend: Literal["torch", "triton"]) -> None:
    weights = weights_of("uniform", 2, 700, 5).to(DEVICE)
    weights[:, 301] = 1e6
    full = torch.tensor([700, 300], device=DEVICE)
    first, second = lists_of(select_nucleus(weights, full, 0.9, backend=backend))
    assert first == [301] and 150 < len(second) < 270


@pytest.mark.parametrize(
    ("n", "chunk", "mass", "kind"),
    [(60, 8192, mass, kind) for mass in (0.05, 0.5, 0.95, 1.0) for kind in KINDS]
    + [(601, 8192, mass, kind) for mass, kind in ((0.05, "peaked"), (0.5, "uniform"), (0.95, "ties"), (1.0, "ramp"))]
    + [(150, 128, 0.5, "uniform")],
)
def test_nucleus(n: int, chunk: int, kind: str, mass: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the mass, its lightest entries are needed for that, and nothing heavier is left out."""
    monkeypatch.setattr(specahead.kernels.selection, "CHUNK", chunk)
    rows = 3
    weights, valid = weights_of(kind, rows, n, n), lengths_of(rows, n, n)
    got = lists_of(select_nucleus(weights.to(DEVICE), valid.to(DEVICE), mass, backend="triton"))
    for row, size, chosen in zip(weights.double(), valid.tolist(), got, strict=True):
        total = float(row[:size].sum())
        assert chosen == sorted(set(chosen)) and all(0 <= i < size for i in chosen)
        if not total:
            assert len(chosen) == size
            continue
        held = row[chosen]
        others = torch.ones(size, dtype=torch.bool)
        others[chosen] = False
        assert float(held.sum()) >= mass * total * (1 - 1e-5)
        assert not others.any() or float(row[:size][others].max()) < float(held.min())
        assert float(held[held > held.min()].sum()) < mass * total * (1 + 1e-5)


def test_infinity_is_always_taken_and_lists_are_cut_to_their_width() -> None:
    weights = torch.rand(2, 300, generator=torch.Generator().manual_seed(0))
    weights[:, 250:260] = torch.inf
    full, k = torch.tensor([300, 300]), torch.tensor([10, 12])
    arguments = (weights.to(DEVICE), full.to(DEVICE), k.to(DEVICE), "triton")
    chosen = lists_of(select_top_k(*arguments, 12))
    assert all(set(range(250, 260)) <= set(row) for row in chosen)
    assert [len(row) for row in chosen] == [10, 12]
    lists, counts = select_top_k(*arguments, 4)
    assert lists.shape == (2, 4) and counts.tolist() == [4, 4]


def test_lengths_and_counts_may_be_expanded() -> None:
    weights = weights_of("uniform", 3, 60, 1)
    full, k = (torch.tensor([number], device=DEVICE).expand(3) for number in (50, 7))
    assert full.stride() == (0,)
    wanted = select_top_k(weights, full.cpu(), k.cpu())
    assert lists_of(select_top_k(weights.to(DEVICE), full, k, "triton")) == lists_of(wanted)


def test_what_triton_takes() -> None:
    one = torch.tensor([1], device=DEVICE)
    with pytest.raises(ValueError, match="float32"):
        select_top_k(torch.rand(1, 4, dtype=torch.float64, device=DEVICE), one, one, "triton")
    with pytest.raises(ValueError, match="mass"):
        select_nucleus(torch.rand(1, 4, device=DEVICE), one, 1.5, backend="triton")
