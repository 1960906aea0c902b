"""Bits as lists: Triton (on a GPU, or interpreted) against the torch reference, and that against plain Python."""

import pytest
import torch

from kernels import listed_words
from kernels.listed_words import list_words

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("groups", "outer", "inner", "width"), [(1, 1, 1, 1), (2, 3, 2, 130), (3, 2, 4, 700), (0, 2, 2, 64)]
)
def test_bits_as_lists(
    groups: int, outer: int, inner: int, width: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, empty and random rows, groups of all sizes, more words than are needed."""
    monkeypatch.setattr(listed_words, "_CHUNK", 128)
    generator = torch.Generator().manual_seed(width)
    chosen = torch.rand(groups, outer * inner, width, generator=generator) < 0.3
    if groups > 1:
        chosen[0, 0], chosen[1, -1] = True, False
    blocks = torch.randint(0, width + 1, (groups,), generator=generator).int()
    blocks[:1] = width
    count = -(-width // 64) + 1
    padded = torch.nn.functional.pad(chosen, (0, count * 64 - width), value=True)  # which do not count
    bits = padded.unflatten(2, (count, 64)).long() << torch.arange(64)
    arguments = bits.sum(3).to(DEVICE), blocks.to(DEVICE), inner, width
    lists, counts = (part.cpu() for part in list_words(*arguments, backend))
    assert lists.shape == (outer, groups, inner, width) and counts.shape == lists.shape[:3]
    for group in range(groups):
        for row in range(outer * inner):
            wanted = [at for at in range(int(blocks[group])) if chosen[group, row, at]]
            place = row // inner, group, row % inner
            assert lists[place][: int(counts[place])].tolist() == wanted


def test_what_does_not_fit_is_refused() -> None:
    words, blocks = torch.zeros(1, 3, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 rows in groups of 2, 2 words for 64 blocks"):
        list_words(words, blocks, 2, 64)
    with pytest.raises(
        ValueError, match="2 words for 129 blocks; expected whole groups, and 3 words at least"
    ):
        list_words(words, blocks, 3, 129)
