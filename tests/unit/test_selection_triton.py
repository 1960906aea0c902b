"""Selection of blocks: Triton, on a GPU or interpreted, against the torch reference and plain sorting."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import selection
from kernels.selection import compact_bits, select_nucleus, select_top_k, select_top_k_over_all

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["uniform", "peaked", "flat", "ties", "zeros", "tiny", "sparse", "large", "softmax"]


def random_weights(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator)
    match kind:
        case "zeros":
            values = torch.zeros(shape)
            values.view(-1)[::2] = -0.0
        case "flat":
            values = torch.full(shape, 0.37)
        case "ties":
            values = (values * 3).round() / 8
        case "peaked":
            values = values.pow(30)
        case "tiny":  # denormal and ordinary ones
            values = values * torch.where(values < 0.5, 1e-41, 1e-3)
        case "sparse":
            values = values.where(values > 0.7, 0.0)
        case "large":  # near the end of float32, where the sums still are finite
            values = values * 1e35
        case "softmax":
            values = (torch.randn(shape, generator=generator) * 4).softmax(-1)
    return values


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def same(result: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for got, other in zip(result, wanted, strict=True):
        assert got.dtype == other.dtype == torch.int32
        assert torch.equal(got.cpu(), other.cpu())


@pytest.fixture(params=["whole", "chunks", "aside"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows held whole; read in chunks; in chunks so small that a search does not end among the entries put aside."""
    if request.param != "whole":
        monkeypatch.setattr(selection, "_CHUNK", {"chunks": 256, "aside": 64}[request.param])
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_top_k(kind: str, reading: str) -> None:
    n = 700
    weights = random_weights(kind, (8, n), 1).to(DEVICE)
    valid = ints(0, 1, 2, 300, n, n, n, 643)
    k = ints(3, 1, 1, 1000, 0, 77, n - 1, 200)
    for width in (n + 9, 100, 1):
        same(
            select_top_k(weights, valid, k, "triton", width), select_top_k(weights, valid, k, "torch", width)
        )
    lists, counts = select_top_k(weights, valid, k, "triton", n)
    for row, size, wanted, got, count in zip(
        weights.cpu().numpy(), valid.tolist(), k.tolist(), lists.cpu(), counts.tolist(), strict=True
    ):
        order = np.argsort(-row[:size], kind="stable")[:wanted]
        assert got[:count].tolist() == sorted(order.tolist())
        assert not got[count:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mass", [0.001, 0.5, 0.9, 0.99, 1.0])
def test_nucleus_holds_the_mass_and_little_more(kind: str, mass: float, reading: str) -> None:
    n = 700
    weights = random_weights(kind, (6, n), 2)
    valid = [0, 1, 2, 300, n, 643]
    lists, counts = select_nucleus(weights.to(DEVICE), ints(*valid), mass, "triton", n)
    for row, size, got, count in zip(weights.double(), valid, lists.cpu(), counts.tolist(), strict=True):
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[got[:count].long()] = True
        assert int(chosen.sum()) == count and not chosen[size:].any() and not got[count:].any()
        inside = row[:size]
        if not size:
            continue
        total, kept = inside.sum(), inside[chosen[:size]]
        assert kept.sum() >= (mass - 2e-6) * total
        if not total > 0:
            assert count == size
            continue
        lightest = kept.min()
        assert torch.equal(chosen[:size], inside >= lightest)  # ties stay whole
        # Without its lightest entries it would hold less.
        assert kept[kept > lightest].sum() < (mass + 2e-6) * total


@pytest.mark.parametrize("mass", [0.05, 0.25, 0.75, 0.9, 1.0])
def test_nucleus_is_the_references(mass: float, reading: str) -> None:
    """Of weights whose sums are exact; a nucleus wider than the lists is cut to its heaviest."""
    n = 600
    for kind in ("ties", "zeros", "dyadic"):
        if kind == "dyadic":
            generator = torch.Generator().manual_seed(3)
            weights = torch.randint(0, 4000, (5, n), generator=generator).float() / 4096
        else:
            weights = random_weights(kind, (5, n), 4)
        weights, valid = weights.to(DEVICE), ints(0, 1, 317, n, n)
        for width in (n, 150, 1):
            same(
                select_nucleus(weights, valid, mass, "triton", width),
                select_nucleus(weights, valid, mass, "torch", width),
            )


@pytest.mark.parametrize("kind", ["uniform", "peaked", "ties", "zeros", "tiny", "sparse"])
@pytest.mark.parametrize("way", ["plain", "crowded", "chunks"])
def test_top_k_over_all(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """crowded: more scores near the threshold than are put aside; chunks: rows that are not held whole."""
    if way == "crowded":
        monkeypatch.setattr(selection, "_CANDIDATES", 8)
    if way == "chunks":
        monkeypatch.setattr(selection, "_CHUNK", 64)
    monkeypatch.setattr(selection, "_TILE_COLUMNS", 64)
    monkeypatch.setattr(selection, "_PROGRAMS", 8)
    groups, rows, n = 4, 5, 150
    scores = random_weights(kind, (groups, rows, n), 5).to(DEVICE)
    generator = torch.Generator().manual_seed(6)
    forced = (torch.rand(scores.shape, generator=generator) < 0.1).to(DEVICE)
    valid = ints(n, 97, 0, n)
    for count in ((200, 40, 5, 0), (rows * n + 3, 1, 0, 333)):
        for mask in (None, forced, forced.to(torch.uint8)):
            for width in (n, 23):
                arguments = (scores, ints(*count), valid, width, mask)
                same(select_top_k_over_all(*arguments, "triton"), select_top_k_over_all(*arguments))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_budget_by_hand(backend: str) -> None:
    scores = torch.tensor([[[0.5, 0.1, 0.5, 0.0], [0.9, 0.5, 0.2, 0.7]]], device=DEVICE)
    forced = torch.tensor([[[False, True, False, False], [False, False, False, True]]], device=DEVICE)

    def lists(count: int, width: int, valid: int = 4, mask: Tensor | None = None) -> list[list[int]]:
        got, counts = select_top_k_over_all(scores, ints(count), ints(valid), width, mask, backend)
        return [row[:c].tolist() for row, c in zip(got[0], counts[0].tolist(), strict=True)]

    assert lists(3, 4) == [[0], [0, 3]]  # the first of three ties
    assert lists(3, 4, mask=forced) == [[0, 1, 2], [0, 3]]  # 0.7 is forced and takes nothing from the budget
    assert lists(100, 4) == [[0, 1, 2], [0, 1, 2, 3]]  # never the 0
    assert lists(3, 4, valid=2, mask=forced) == [[0, 1], [0, 1]]
    assert lists(0, 4, mask=forced) == [[1], [3]]
    assert lists(4, 1, mask=forced) == [[1], [3]]  # the forced one stays, not the heaviest
    assert lists(4, 2, mask=forced) == [[0, 1], [0, 3]]


def test_bits(reading: str) -> None:
    generator = torch.Generator().manual_seed(7)
    for words in (1, 3, 11):
        bits = torch.rand(5, words * 64, generator=generator) < 0.3
        bits[4] = True
        valid = ints(words * 64, 0, 33, words * 64 - 1, words * 64)
        packed = np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.int64)
        table = torch.from_numpy(packed).to(DEVICE)
        for width in (words * 64 + 5, 7):
            lists, counts = compact_bits(table, valid, width, "triton")
            same((lists, counts), compact_bits(table, valid, width))
            for row, size, got, count in zip(bits, valid.tolist(), lists.cpu(), counts.tolist(), strict=True):
                assert got[:count].tolist() == row[:size].nonzero().flatten().tolist()[:width]
    same(compact_bits(table, valid), compact_bits(table, valid, int(valid.max())))


def test_no_rows_and_no_entries() -> None:
    for rows, n in ((0, 5), (3, 0)):
        weights, valid = (
            torch.zeros(rows, n, device=DEVICE),
            torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        )
        for backend in ("torch", "triton"):
            for lists, counts in (
                select_top_k(weights, valid, valid + 2, backend, 4),
                select_nucleus(weights, valid, 0.9, backend, 4),
                select_top_k_over_all(weights[None], ints(3), ints(n), 4, None, backend),
                compact_bits(weights.long(), valid, 4, backend),
            ):
                assert lists.flatten(0, -2).shape == (rows, 4) and not lists.any()
                assert counts.numel() == rows and not counts.any()


def test_triton_needs_a_width_and_plain_float32() -> None:
    weights, valid = torch.ones(2, 6, device=DEVICE), ints(6, 6)
    with pytest.raises(ValueError, match="select_top_k: backend 'triton' needs width"):
        select_top_k(weights, valid, valid, "triton")
    with pytest.raises(ValueError, match="select_nucleus: backend 'triton' needs width"):
        select_nucleus(weights, valid, 0.5, "triton")
    with pytest.raises(ValueError, match="compact_bits: backend 'triton' needs width"):
        compact_bits(weights.long(), valid, None, "triton")
    with pytest.raises(ValueError, match=r"contiguous torch\.float32"):
        select_top_k(weights.double(), valid, valid, "triton", 3)
    with pytest.raises(ValueError, match=r"contiguous torch\.float32"):
        select_nucleus(weights[:, ::2], valid, 0.5, "triton", 3)
    with pytest.raises(ValueError, match="mass must lie in"):
        select_nucleus(weights, valid, 1.5, "triton", 3)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_in_a_cuda_graph() -> None:
    """What a graph selects follows its inputs, long rows and one budget included."""
    n = 20000
    weights = torch.rand(4, n, device=DEVICE)
    valid, k = ints(n, n, n, n), ints(1, 1, 1, 1)
    count, many = ints(0), ints(n)

    def run() -> list[tuple[Tensor, Tensor]]:
        return [
            select_top_k(weights, valid, k, "triton", 900),
            select_nucleus(weights, valid, 0.3, "triton", n),
            select_top_k_over_all(weights[None], count, many, n, None, "triton"),
        ]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        weights.copy_(random_weights("uniform", (4, n), seed))
        valid.copy_(ints(n, 5, n - 3, 9000))
        k.copy_(ints(700, 800, 950, seed))
        count.fill_(3000 + seed)
        graph.replay()
        torch.cuda.synchronize()
        same(captured[0], select_top_k(weights, valid, k, "torch", 900))
        same(captured[2], select_top_k_over_all(weights[None], count, many, n))
