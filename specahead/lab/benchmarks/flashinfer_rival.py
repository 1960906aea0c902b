"""FlashInfer (FA2) as the rival of `specahead bench kernels`: over the same batch, dense or over the same lists.

Over lists a (sequence, KV head) is a request of its own: the pages are seen as pages of one head, and the query heads
of a KV head as the heads of a model that has one KV head. FlashInfer's causal mask, whose last query stands at the last
key, is right for listed pages laid end to end, because the lists hold all pages that the queries stand in.
"""

import importlib.util

import torch
from torch import Tensor

from specahead.kernels.paged_attention import BlockLists
from specahead.lab.benchmarks.flashinfer_attention import (
    HEAD_DIMS,
    Planned,
    Requests,
    dense_requests,
    make_planned,
    make_workspace,
    plan,
    starts_of,
)
from specahead.lab.benchmarks.gpu_timing import graph_milliseconds


def flashinfer_attends(head_dim: int) -> bool:
    """Return whether FlashInfer is installed and takes such heads: then it is a rival."""
    return importlib.util.find_spec("flashinfer") is not None and head_dim in HEAD_DIMS


def listed_requests(block_tables: Tensor, kv_length: int, queries: int, blocks: BlockLists) -> Requests:
    """Return one request for each (sequence, KV head), of sequences of one length with as many queries each.

    block_tables: [sequences, max_pages] int32; blocks: of one layer, ascending lists of pages that end with all pages
    that the queries stand in; all on the CPU. A listed page is page * kv_heads + head.
    """
    sequences, kv_heads, width = blocks.lists.shape
    read = torch.arange(width) < blocks.counts[..., None]
    pages = block_tables.gather(1, blocks.lists.where(read, 0).flatten(1).long()).view_as(blocks.lists)
    heads = torch.arange(kv_heads, dtype=torch.int32)[:, None]
    each = torch.ones(sequences * kv_heads, dtype=torch.int32)
    return Requests(
        starts_of(each * queries),
        starts_of(blocks.counts.flatten()),
        (pages * kv_heads + heads)[read],
        each * ((kv_length - 1) % blocks.block_size + 1),
    )


def time_dense(
    queries: Tensor, k_pages: list[Tensor], v_pages: list[Tensor], layout: tuple[Tensor, ...], repeats: int
) -> float:
    """Return the milliseconds of one dense layer, planned for this very batch before the graph is captured.

    queries: [tokens, heads, dim]; k_pages, v_pages: of each layer; layout: block tables, lengths and query starts.
    """
    heads, (kv_heads, page_size) = queries.shape[1], k_pages[0].shape[1:3]
    tables, lengths, starts = (each.cpu() for each in layout)
    requests = dense_requests(tables, lengths, starts, page_size)
    planned = _planned(requests, make_workspace(queries.device), queries, heads, kv_heads, page_size)
    out = torch.empty_like(queries)

    def work() -> None:
        for pages in zip(k_pages, v_pages, strict=True):
            planned.wrapper.run(queries, pages, out=out)

    return graph_milliseconds(work, repeats) / len(k_pages)


def time_listed(
    queries: Tensor,
    k_pages: list[Tensor],
    v_pages: list[Tensor],
    block_tables: Tensor,
    kv_length: int,
    blocks: BlockLists,
    repeats: int,
) -> float:
    """Return the milliseconds of one layer over lists, planned beforehand and with queries in FlashInfer's order.

    queries: [sequences * rows, heads, dim]; blocks: of all layers, [layers, sequences, kv_heads, width].
    """
    (sequences, kv_heads), page_size = blocks.lists.shape[1:3], blocks.block_size
    rows, group = len(queries) // sequences, queries.shape[1] // kv_heads
    lists, counts, tables = blocks.lists.cpu(), blocks.counts.cpu(), block_tables.cpu()
    plans, workspace = [], make_workspace(queries.device)
    for i in range(len(k_pages)):
        requests = listed_requests(tables, kv_length, rows, BlockLists(lists[i], counts[i], page_size))
        plans.append(_planned(requests, workspace, queries, group, 1, page_size))
    by_head = queries.view(sequences, rows, kv_heads, group, -1).transpose(1, 2)
    arranged = by_head.reshape(-1, group, queries.shape[2])
    out = torch.empty_like(arranged)
    views = [tuple(each.view(-1, 1, *each.shape[2:]) for each in pair) for pair in zip(k_pages, v_pages, strict=True)]

    def work() -> None:
        for planned, pages in zip(plans, views, strict=True):
            planned.wrapper.run(arranged, pages, out=out)

    return graph_milliseconds(work, repeats) / len(plans)


def _planned(
    requests: Requests, workspace: Tensor, queries: Tensor, heads: int, kv_heads: int, page_size: int
) -> Planned:
    planned, dim = make_planned(workspace), queries.shape[2]
    plan(planned, requests, heads, kv_heads, dim, page_size, dim**-0.5, queries.dtype)
    return planned
