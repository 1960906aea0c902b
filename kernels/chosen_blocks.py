"""Which blocks of the KV a query reads in a model whose own attention chooses them: InfLLM-v2 (arXiv 2509.24663).

The definition is that of MiniCPM4.1's modeling_minicpm.py and of its kernels (github.com/OpenBMB/infllmv2_cuda_impl):

    a window is two neighbouring full pages, a coarse window eight that begin at every fourth; keys of either are means
    weight of a window = sum over a KV head's query heads of exp(q·k - logsumexp over coarse windows of q·k)
    weight of a block = the greatest of the windows that touch it

Neighbouring blocks share a window, so they may tie, which that definition leaves open: here the earlier one is chosen.

Products with windows are means of products with pages, since means of keys are (kernels.page_means). So one pass over
the means of pages gives both kinds of windows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend, jit, power_of_two, tl
from specahead.kernels.paged_attention import BlockLists
from specahead.kernels.selection import select_top_k

STRIDE = 16  # tokens from one window to the next: those of a page
WINDOW = 2  # pages of a window
COARSE_STRIDE, COARSE_WINDOW = 4, 8  # pages, of coarse windows
LEAST_DENSE = COARSE_WINDOW * STRIDE  # a sequence of fewer tokens has no coarse window

_TILE = 64  # pages, coarse windows or blocks that a program takes at once
# Blocks that a program scores. It finds the logsumexp of all windows first, so of many rows it takes a whole one.
_FEW_ROWS, _OF_FEW, _OF_MANY = 128, 256, 1 << 20


@dataclass(frozen=True)
class BlockRule:
    """How many blocks a query chooses, and which it reads in any case."""

    block_size: int
    """Tokens of a block: whole pages."""
    top: int
    """Blocks that a query reads, at most, those that it reads in any case among them."""
    first: int
    """Blocks at the beginning that it reads in any case."""
    local: int
    """Blocks before its own that it reads in any case, and its own."""
    dense_below: int
    """A query that sees fewer tokens than this, itself included, reads everything."""

    def width(self, queries: int) -> int:
        """Return the most blocks that `queries` tokens read together, where the first one chooses."""
        beside = -(-(queries - 1) // self.block_size)  # blocks that begin after the first token's own
        return max(self.top, -(-self.dense_below // self.block_size)) + beside


@dataclass(frozen=True)
class Choice:
    """How many blocks each query chooses: for all layers of a pass, since it follows from lengths alone."""

    rule: BlockRule
    seen: Tensor
    """[choosers] int32, tokens that each query sees, itself included; 0: there is no query."""
    blocks: Tensor
    """[choosers * kv_heads] int32, all blocks of the query's sequence."""
    chosen: Tensor
    """[choosers * kv_heads] int32, blocks that are listed."""
    most: int
    """Tokens that share a choice, at most."""


def plan_choice(rule: BlockRule, seen: Tensor, lengths: Tensor, kv_heads: int, most: int) -> Choice:
    """Return how many blocks queries choose, and list besides since later tokens that share the choice stand there.

    seen, most: as Choice has them. lengths: [choosers] int32, tokens of each query's sequence, later ones included.
    The host does not wait, so that a CUDA graph can capture this.
    """
    own, blocks = -(-seen // rule.block_size), -(-lengths // rule.block_size)
    chosen = torch.where(seen < rule.dense_below, own, own.clamp(max=rule.top)) + blocks - own
    return Choice(rule, seen, blocks.repeat_interleave(kv_heads), chosen.repeat_interleave(kv_heads), most)


def choose_blocks(
    queries: Tensor, means: Tensor, tables: Tensor, choice: Choice, scale: float, backend: Backend = "torch"
) -> BlockLists:
    """Choose the blocks of each query's sequence by that query, for each KV head.

    queries: [choosers, heads, head_dim], contiguous, of the dtype of the means.
    means: [pages, kv_heads, head_dim], contiguous (kernels.page_means).
    tables: [choosers, pages of a sequence] int32, contiguous, the page of each logical page.
    scale: of the scores.
    Returns lists [choosers, kv_heads, width] and counts. The host does not wait, so that a CUDA graph can capture this.
    """
    count, kv_heads, rule = len(queries), means.shape[1], choice.rule
    most_blocks = -(-tables.shape[1] * STRIDE // rule.block_size)
    score = _score_in_triton if backend == "triton" else _score_in_torch
    scores = score(queries, means, tables, choice, scale, most_blocks).flatten(0, 1)
    width = min(rule.width(choice.most), most_blocks)
    lists, counts = select_top_k(scores, choice.blocks, choice.chosen, backend, width)
    return BlockLists(lists.view(count, kv_heads, -1), counts.view(count, kv_heads), rule.block_size)


def _score_in_torch(
    queries: Tensor, means: Tensor, tables: Tensor, choice: Choice, scale: float, blocks: int
) -> Tensor:
    """Return the weights of blocks, [choosers, kv_heads, blocks] float32; infinite for those that are read in any case.

    Where everything is read they say nothing.
    """
    rule, kv_heads = choice.rule, means.shape[1]
    in_block = rule.block_size // STRIDE
    scores = torch.zeros(len(queries), kv_heads, blocks, device=queries.device)
    for i, tokens in enumerate(choice.seen.tolist()):
        if tokens < rule.dense_below:
            continue
        of_pages = means[tables[i, : tokens // STRIDE].long()].float()
        products = scale * torch.einsum("hgd,phd->hgp", queries[i].unflatten(0, (kv_heads, -1)).float(), of_pages)
        coarse = products.unfold(-1, COARSE_WINDOW, COARSE_STRIDE).mean(-1).logsumexp(-1, keepdim=True)
        windows = (products.unfold(-1, WINDOW, 1).mean(-1) - coarse).exp().sum(1)
        # The windows that touch a block begin in it, or in the page before it.
        touching = F.pad(windows, (1, blocks * in_block - windows.shape[1])).unfold(-1, in_block + 1, in_block)
        scores[i] = touching.amax(-1)
        scores[i, :, : rule.first] = scores[i, :, max(0, (tokens - 1) // rule.block_size - rule.local) :] = torch.inf
    return scores


def _score_in_triton(
    queries: Tensor, means: Tensor, tables: Tensor, choice: Choice, scale: float, blocks: int
) -> Tensor:
    """Return what `_score_in_torch` does."""
    rule, seen = choice.rule, choice.seen
    (count, heads, dim), (kv_heads, pages), device = queries.shape, (means.shape[1], tables.shape[1]), queries.device
    group = heads // kv_heads
    products = torch.empty(count, kv_heads, group, pages, dtype=torch.float32, device=device)
    scores = torch.empty(count, kv_heads, blocks, dtype=torch.float32, device=device)
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "DENSE_BELOW": rule.dense_below, "STRIDE": STRIDE, "TILE": _TILE}
    _products_kernel[(count, kv_heads, -(-pages // _TILE))](
        queries,
        means,
        tables,
        seen,
        products,
        scale,
        pages,
        **sizes,
        ROWS=max(16, power_of_two(group)),
        DIM=dim,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
    )
    of_program = _OF_FEW if count * kv_heads < _FEW_ROWS else _OF_MANY
    _scores_kernel[(count * kv_heads, -(-blocks // of_program))](
        products,
        seen,
        scores,
        pages,
        blocks,
        **sizes,
        ROWS=power_of_two(group),
        COARSE_STRIDE=COARSE_STRIDE,
        COARSE_WINDOW=COARSE_WINDOW,
        BLOCK=rule.block_size,
        FIRST=rule.first,
        LOCAL=rule.local,
        BLOCKS=of_program,
        WINDOWS=power_of_two(rule.block_size // STRIDE + 1),
        num_warps=8,
    )
    return scores


@jit
def _products_kernel(
    queries_ptr,
    means_ptr,
    tables_ptr,
    seen_ptr,
    products_ptr,
    scale,
    pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DENSE_BELOW: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply the queries of one KV head with the means of TILE full pages of one sequence."""
    chooser, kv_head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * TILE
    seen = tl.load(seen_ptr + chooser)
    full = seen // STRIDE
    if (seen >= DENSE_BELOW) & (first < full):
        row, page, dim = tl.arange(0, ROWS), first + tl.arange(0, TILE), tl.arange(0, DIM)
        real, is_full = row < GROUP, page < full
        place = tl.load(tables_ptr + chooser * pages + page, mask=is_full, other=0).to(tl.int64) * KV_HEADS + kv_head
        of_group = (chooser * KV_HEADS + kv_head) * GROUP + row
        queries = tl.load(queries_ptr + of_group[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
        keys = tl.load(means_ptr + place[:, None] * DIM + dim[None, :], mask=is_full[:, None], other=0.0)
        products = tl.dot(queries.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision=PRECISION) * scale
        at = of_group[:, None] * pages + page[None, :]
        tl.store(products_ptr + at, products, mask=real[:, None] & is_full[None, :])


@jit
def _scores_kernel(
    products_ptr,
    seen_ptr,
    scores_ptr,
    pages,
    blocks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DENSE_BELOW: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COARSE_STRIDE: tl.constexpr,
    COARSE_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """Turn the products of one KV head's queries with pages into the weights of BLOCKS blocks."""
    item = tl.program_id(0).to(tl.int64)
    seen = tl.load(seen_ptr + item // KV_HEADS)
    is_sparse = seen >= DENSE_BELOW
    full = tl.where(is_sparse, seen // STRIDE, 0)
    row, place = tl.arange(0, ROWS), tl.arange(0, TILE)
    real = row < GROUP
    rows = products_ptr + (item * GROUP + row) * pages

    # The logsumexp of each query over coarse windows.
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    windows, of_window = (full - COARSE_WINDOW) // COARSE_STRIDE + 1, tl.arange(0, COARSE_WINDOW)
    for start in tl.range(0, windows, TILE):
        window = start + place
        inside = real[:, None] & (window < windows)[None, :]
        page = window[:, None] * COARSE_STRIDE + of_window[None, :]
        of_pages = tl.load(rows[:, None, None] + page[None, :, :], mask=inside[:, :, None], other=0.0)
        products = tl.where(inside, tl.sum(of_pages, 2) / COARSE_WINDOW, float("-inf"))
        larger = tl.maximum(largest, tl.max(products, 1))
        shift = tl.where(real, larger, 0.0)  # rows beyond the group's have no product
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(products - shift[:, None]), 1)
        largest = larger
    coarse = tl.where(real, largest + tl.log(total), 0.0)

    # Of all windows alike, so that blocks that share their weightiest one tie to the bit.
    own, first, of_block = (seen - 1) // BLOCK, tl.program_id(1) * BLOCKS, tl.arange(0, WINDOWS)
    for start in tl.range(first, tl.minimum(first + BLOCKS, blocks), TILE):
        block = start + place
        window = block[:, None] * (BLOCK // STRIDE) - 1 + of_block[None, :]
        touches = (of_block <= BLOCK // STRIDE)[None, :] & (window >= 0) & (window < full - 1)
        inside = real[:, None, None] & touches[None, :, :]
        at = rows[:, None, None] + window[None, :, :]
        product = (tl.load(at, mask=inside, other=0.0) + tl.load(at + 1, mask=inside, other=0.0)) / 2
        of_windows = tl.sum(tl.where(inside, tl.exp(product - coarse[:, None, None]), 0.0), 0)
        forced = is_sparse & ((block < FIRST) | (block >= own - LOCAL))
        weights = tl.where(forced, float("inf"), tl.max(of_windows, 1))
        tl.store(scores_ptr + item * blocks + block, weights, mask=block < blocks)
