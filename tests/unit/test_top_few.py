"""The few largest entries of rows: Triton against torch."""

import pytest
import torch

from specahead.kernels.top_few import top_few

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "entries", "count"), [(1, 1, 1), (3, 4, 4), (5, 97, 1), (2, 4096, 4), (7, 9001, 4)])
def test_triton_gives_what_torch_gives(rows: int, entries: int, count: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    random = torch.Generator().manual_seed(entries)
    values = torch.randn(rows, entries, generator=random).to(DEVICE, dtype)  # in bfloat16 many are equal
    values[0, : entries // 2] = -torch.inf
    found, wanted = top_few(values, count, "triton"), top_few(values, count)
    assert found.dtype == wanted.dtype == torch.int64
    assert torch.equal(found, wanted)


def test_the_first_of_equal_entries_comes_first() -> None:
    pytest.importorskip("triton")
    values = torch.zeros(2, 5000, device=DEVICE)
    values[1, 4500] = values[1, 17] = 1.0
    for backend in ("torch", "triton"):
        found = top_few(values, 3, backend)  # type: ignore[arg-type]
        assert found.tolist() == [[0, 1, 2], [17, 4500, 0]]
        assert found[:, 0].tolist() == values.argmax(1).tolist()


def test_a_row_of_nan_gives_entries_that_there_are() -> None:
    """Rows without a sequence may hold anything."""
    pytest.importorskip("triton")
    values = torch.full((2, 5000), torch.nan, device=DEVICE)
    values[1, 40:] = 1.0
    found = top_few(values, 4, "triton")
    assert ((found >= 0) & (found < 5000)).all()


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="the 4 largest of 3 entries"):
        top_few(torch.zeros(1, 3), 4)
