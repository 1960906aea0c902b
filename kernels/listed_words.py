"""Blocks that are given as bits, as lists: what an announcement names, for kernels that take what a pass lists."""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl
from kernels.shared_budget import WORD

_CHUNK = 1024


def list_words(
    words: Tensor, blocks: Tensor, inner: int, width: int, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Ascending lists of the bits that are set.

    words: [groups, rows, words] int64, a bit a block, the lowest first; rows are outer * inner
    blocks: [groups] int32, of which there are so many, the width at most; bits from there on do not count
    Returns lists [outer, groups, inner, width] int32, undefined beyond their counts, and these [outer, groups, inner]
    int32: layers before sequences before heads, as a pass lists its blocks.
    """
    check_backend("list_words", backend, ("torch", "triton"))
    groups, rows, count = words.shape
    if rows % inner or count * WORD < width:
        raise ValueError(
            f"list_words: {rows} rows in groups of {inner}, {count} words for {width} blocks; expected whole groups, "
            f"and {-(-width // WORD)} words at least"
        )
    if backend == "torch":
        column = torch.arange(width, device=words.device)
        chosen = (words[..., column // WORD] >> (column % WORD) & 1).bool()
        chosen &= column < blocks[:, None, None]
        chosen = chosen.unflatten(1, (-1, inner)).transpose(0, 1)
        order = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
        return order, chosen.sum(-1, dtype=torch.int32)
    shape = rows // inner, groups, inner
    lists = torch.empty(*shape, width, dtype=torch.int32, device=words.device)
    counts = torch.empty(shape, dtype=torch.int32, device=words.device)
    if groups * rows:
        _list_words_kernel[(groups * rows,)](
            words.contiguous(),
            blocks,
            lists,
            counts,
            count,
            width,
            groups,
            rows,
            inner,
            CHUNK=min(_CHUNK, power_of_two(max(width, WORD))),
        )
    return lists, counts


@jit
def _list_words_kernel(
    words_ptr, blocks_ptr, lists_ptr, counts_ptr, count, width, groups, rows, inner, CHUNK: tl.constexpr
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    place = row % rows
    out = (place // inner * groups + group) * inner + place % inner
    blocks = tl.minimum(tl.load(blocks_ptr + group), width)
    words_ptr += row * count
    lists_ptr += out * width
    taken = blocks * 0
    for start in tl.range(0, blocks, CHUNK):
        at = start + tl.arange(0, CHUNK)
        word = tl.load(words_ptr + at // 64, mask=at < blocks, other=0)
        chosen = ((word >> (at % 64).to(tl.int64)) & 1).to(tl.int32)
        tl.store(lists_ptr + taken + tl.cumsum(chosen, 0) - chosen, at, mask=chosen != 0)
        taken += tl.sum(chosen, 0)
    tl.store(counts_ptr + out, taken)
