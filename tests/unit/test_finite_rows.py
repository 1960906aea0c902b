"""Which rows of logits are finite: Triton (on a GPU, or interpreted) and torch, against what they must say."""

import pytest
import torch
from torch import Tensor

from specahead.kernels.finite_rows import are_finite

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("vocab", [8, 5000])
def test_logits_that_are_no_numbers_are_found_in_their_row(vocab: int, backend: str) -> None:
    logits = torch.randn(7, 3, vocab)
    logits[1, 0, 3] = float("nan")
    logits[2, 1, vocab - 1] = float("inf")
    logits[3, 2] = float("-inf")
    logits[4, 0, : vocab - 1] = float("-inf")  # a vocabulary may be masked
    logits[5, 2, 1] = float("nan")  # behind what is drafted
    logits[6] = float("-inf")
    logits[6, 0, 0] = 1.0
    counts = torch.tensor([2, 2, 2, 2, 2, 1, 0])
    assert are_finite(logits.to(DEVICE), counts.to(DEVICE), backend).tolist() == [1, 0, 0, 0, 1, 1, 1]


def spoilt(rows: int, places: int, vocab: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Logits of which most positions are as they should be, and each of the others has a fault or a harmless mask."""
    logits = torch.randn(rows, places, vocab, generator=random)
    logits *= torch.finfo(dtype).max / logits.abs().amax()  # the largest numbers there are
    for position in logits.flatten(0, 1):
        fault, at = (int(torch.randint(n, (), generator=random)) for n in (12, vocab))
        if fault < 2:
            position[at] = (float("nan"), float("inf"))[fault]
        elif fault < 4:
            position.fill_(float("-inf"))
            position[at] = (float("-inf"), -1.0)[fault - 2]
        elif fault == 4:  # a mask does not hide it
            position.fill_(float("-inf"))
            position[at] = float("nan")
    return logits.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "places", "vocab"), [(1, 1, 1), (40, 1, 31), (17, 6, 4096), (5, 3, 4097), (3, 9, 12300)]
)
def test_triton_says_what_torch_says(rows: int, places: int, vocab: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rows + vocab)
    logits = spoilt(rows, places, vocab, dtype, random)
    counts = torch.randint(places, (rows,), generator=random, dtype=torch.int32).to(DEVICE)
    wanted, got = are_finite(logits, counts), are_finite(logits, counts, "triton")
    assert got.dtype == torch.int32 and torch.equal(got, wanted)
    assert rows < 5 or 0 < wanted.sum() < rows
