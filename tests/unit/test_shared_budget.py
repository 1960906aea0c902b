"""The kernels around a shared budget: Triton (on a GPU, or interpreted) against the torch references."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specahead.kernels.shared_budget import remember_weights, room_left, score_blocks
from specahead.sparsity.selection import BlockSelection
from tests.compiling import compile_for_a_gpu

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (2, 3, 64), (3, 4, 1100)]


def ragged(groups: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """first, last, blocks with an empty sequence among them"""
    blocks = torch.randint(0, n + 1, (groups,), generator=generator).int()
    blocks[0] = n
    if groups > 1:
        blocks[1] = 0
    first = torch.minimum(torch.randint(0, 3, (groups,), generator=generator).int(), blocks)
    last = torch.maximum(first, blocks - torch.randint(0, 4, (groups,), generator=generator).int())
    return first, last, blocks


def places_of(groups: int, blocks: Tensor, generator: torch.Generator) -> Tensor:
    """Among two more than there are groups; none for empty groups."""
    places = torch.randperm(groups + 2, generator=generator)[:groups].int()
    return places.where(blocks > 0, -1)


@pytest.mark.parametrize(("groups", "rows", "n"), SHAPES)
def test_scores(groups: int, rows: int, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**63), 2**63 - 1, (groups, rows, -(-n // 64)), generator=generator)
    memory = torch.rand(groups + 2, rows, n, generator=generator)
    importance = torch.rand(rows, generator=generator)
    first, last, blocks = ragged(groups, n, generator)
    places = places_of(groups, blocks, generator)
    if groups > 2:  # one reads everything, and nothing is remembered of it
        first[2], last[2], blocks[2], places[2] = 0, 0, n, -1
    arguments = (words, memory, places, importance, first, last, blocks)
    forced, scores, chosen = score_blocks(*arguments)
    got_forced, got, got_chosen = score_blocks(*(x.to(DEVICE) for x in arguments), backend="triton")
    assert torch.equal(got_forced.cpu(), forced)
    assert torch.equal(got_chosen.cpu().sum(1), chosen.sum(1)) and got_chosen.dtype == chosen.dtype == torch.int32
    torch.testing.assert_close(got.cpu(), scores)
    for group in range(groups):  # the reference itself, bit by bit
        own = memory[places[group]] * importance[:, None]
        for row in range(rows):
            for column in range(min(n, 130)):
                bit = (int(words[group, row, column // 64]) >> (column % 64)) & 1
                wanted = column < blocks[group] and (bit or not first[group] <= column < last[group])
                assert bool(forced[group, row, column]) == bool(wanted)
                if wanted or column >= blocks[group]:
                    assert scores[group, row, column] == 0
                else:
                    assert scores[group, row, column] == own[row, column]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("every", [None, 0, -1])
@pytest.mark.parametrize(("groups", "rows", "n"), SHAPES)
def test_what_is_chosen_already_counts_between_first_and_last(
    groups: int, rows: int, n: int, every: int | None, backend: str
) -> None:
    """every: a word that all of them are, of no bits or of all; None: they are random."""
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**63), 2**63 - 1, (groups, rows, -(-n // 64)), generator=generator)
    if every is not None:
        words.fill_(every)
    first, last, blocks = ragged(groups, n, generator)
    memory, places = torch.zeros(groups, rows, n), torch.arange(groups).int()
    given = words, memory, places, torch.ones(rows), first, last, blocks
    _, _, counted = score_blocks(*(x.to(DEVICE) for x in given), backend)
    chosen = [
        BlockSelection(rows, n, words[group].numpy().view("<u8")).count(int(first[group]), int(last[group]))
        for group in range(groups)
    ]
    assert counted.sum(1).tolist() == chosen
    room = torch.tensor([count + 5 * (group - 1) for group, count in enumerate(chosen)], dtype=torch.int32)
    left = room_left(room.to(DEVICE), counted, backend)
    assert left.dtype == torch.int32 and left.tolist() == [max(0, 5 * (group - 1)) for group in range(groups)]


@pytest.mark.parametrize("parts", [1, 7, 2048, 4999])
def test_room_left_by_triton_is_that_by_torch(parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    chosen = torch.randint(0, 1025, (5, parts), generator=generator, dtype=torch.int32)
    chosen[1] = 0
    room = chosen.sum(1).int() + torch.tensor([1, 0, -1, 2**20, -(2**20)], dtype=torch.int32)
    left = room_left(room.to(DEVICE), chosen.to(DEVICE), "triton")
    assert torch.equal(left.cpu(), room_left(room, chosen)) and left.tolist() == [1, 0, 0, 2**20, 0]


def test_kernels_of_a_pass_that_shares_out_compile_for_a_gpu(tmp_path: Path) -> None:
    integers = ("places_ptr", "first_ptr", "last_ptr", "blocks_ptr", "chosen_ptr", "room_ptr", "left_ptr")
    types = dict.fromkeys(integers, "*i32") | {"words_ptr": "*i64", "forced_ptr": "*u8", "parts": "i32"}
    types |= dict.fromkeys(("memory_ptr", "importance_ptr", "scores_ptr"), "*fp32")
    sizes = {"n": 6400, "word_count": 100, "rows": 256, "CHUNK": 1024}
    for kernel, fixed in {"_score_blocks_kernel": sizes, "_room_left_kernel": {"CHUNK": 2048, "PDL": True}}.items():
        compile_for_a_gpu("specahead.kernels.shared_budget", kernel, types, [fixed], tmp_path)


@pytest.mark.parametrize(("groups", "rows", "n"), SHAPES)
def test_memory(groups: int, rows: int, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    width = n + 3
    memory = torch.rand(groups + 2, rows, n, generator=generator)
    counts = torch.randint(0, n + 1, (groups, rows), generator=generator).int()
    lists = torch.zeros(groups, rows, width, dtype=torch.int32)
    for group in range(groups):
        for row in range(rows):
            count = int(counts[group, row])
            lists[group, row, :count] = torch.randperm(n, generator=generator)[:count].sort().values
    weights = torch.rand(groups, rows, width, generator=generator)
    _, _, blocks = ragged(groups, n, generator)
    places = places_of(groups, blocks, generator)
    wanted, got = memory.clone(), memory.clone().to(DEVICE)
    inner = rows if rows % 2 else 2
    laid_out = [x.unflatten(1, (-1, inner)).transpose(0, 1).contiguous() for x in (lists, counts, weights)]
    remember_weights(wanted, places, *laid_out, blocks, 0.8)
    moved = (x.to(DEVICE) for x in (places, *laid_out, blocks))
    remember_weights(got, *moved, 0.8, backend="triton")
    torch.testing.assert_close(got.cpu(), wanted)
    expected = memory.clone()  # what no group has stays as it is
    for group in range(groups):
        if places[group] < 0:
            continue
        own = expected[places[group]]
        own *= 0.8
        for row in range(rows):
            at = lists[group, row, : counts[group, row]].long()
            own[row, at] = torch.maximum(own[row, at], weights[group, row, : counts[group, row]])
            own[row, blocks[group] :] = 0
    torch.testing.assert_close(wanted, expected)
