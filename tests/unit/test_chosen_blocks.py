"""Choosing blocks in Triton (on a GPU, or interpreted) against the reference, which test_minicpm.py holds to the model.

Mean keys of pages are written by either backend alike.
"""

import pytest
import torch
from torch import Tensor

from specahead.kernels.chosen_blocks import BlockRule, choose_blocks, plan_choice
from specahead.kernels.kv_scales import EIGHT_BITS, KVScales
from specahead.kernels.page_means import write_page_means

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEN, LENGTHS = [0, 100, 640, 333, 797], [0, 104, 644, 333, 800]  # no query, a short sequence, and queries of rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "few"), [(4, 2, 16, 128), (6, 2, 32, 0), (16, 1, 16, 128)])
def test_both_backends_choose_the_same_blocks(
    heads: int, kv_heads: int, dim: int, few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specahead.kernels.chosen_blocks._FEW_ROWS", few)
    random = torch.Generator().manual_seed(heads)
    means = torch.randn(300, kv_heads, dim, generator=random).to(DEVICE, dtype)
    queries = (2 * torch.randn(5, heads, dim, generator=random)).to(DEVICE, dtype)
    tables = torch.randperm(300, generator=random)[:250].view(5, 50).int().to(DEVICE)
    seen, lengths = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (SEEN, LENGTHS))
    rule = BlockRule(block_size=64, top=5, first=1, local=2, dense_below=200)
    given = queries, means, tables, plan_choice(rule, seen, lengths, kv_heads, 5), dim**-0.5
    wanted, got = (choose_blocks(*given, backend) for backend in ("torch", "triton"))
    assert wanted.counts[:, 0].tolist() == [0, 2, 6, 5, 5]
    assert torch.equal(got.counts, wanted.counts)
    for i in range(5):
        for head in range(kv_heads):
            count = int(wanted.counts[i, head])
            assert torch.equal(got.lists[i, head, :count], wanted.lists[i, head, :count])


def test_a_choice_reads_the_first_blocks_the_last_ones_and_the_weightiest() -> None:
    """The query likes the fifth of blocks 2 to 6."""
    means = torch.zeros(48, 1, 16)
    means[5 * 4 + 1] = 4.0
    queries, tables = torch.ones(1, 1, 16), torch.arange(48, dtype=torch.int32)[None]
    seen = torch.tensor([10 * 64 + 30], dtype=torch.int32)
    rule = BlockRule(block_size=64, top=6, first=2, local=2, dense_below=200)
    blocks = choose_blocks(queries, means, tables, plan_choice(rule, seen, seen + 40, 1, 41), 0.25)
    assert blocks.lists[0, 0, : blocks.counts[0, 0]].tolist() == [0, 1, 5, 8, 9, 10, 11]


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_mean_of_a_page_is_written_once_it_is_full(backend: str, eight_bit: bool) -> None:
    random = torch.Generator().manual_seed(1)
    pages: Tensor = torch.randn(6, 2, 16, 24, generator=random).to(DEVICE)
    scales = KVScales(torch.tensor([[0.25, 2.0], [1.0, 1.0]]).to(DEVICE), torch.zeros(2, 2, 24, device=DEVICE))
    if eight_bit:
        pages = pages.to(EIGHT_BITS)
    read = pages.float() * (scales.scales[0, :, None, None] if eight_bit else 1.0)
    means = torch.full((9, 2, 24), 7.0, device=DEVICE)
    slots = torch.tensor([4 * 16 + 14, 4 * 16 + 15, 2 * 16, -1, 16 + 15], device=DEVICE)
    numbers = torch.tensor([8, 8, 3, -1, 6], device=DEVICE)
    write_page_means(pages, means, slots, numbers, backend, scales if eight_bit else None)
    torch.testing.assert_close(means[[8, 6]], read[[4, 1]].mean(2))
    assert bool((means[[0, 1, 2, 3, 4, 5, 7]] == 7).all())
