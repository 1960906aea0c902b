"""Causal attention over paged KV by FlashInfer (FA2): planned on the host, then run for each layer that reads so.

A dense read is one request a sequence. A read over block lists is one request a (sequence, KV head): the pages are
seen as pages of a single head, and the query heads of a KV head as the heads of a model that has one. Laid end to end,
listed pages are masked rightly by FlashInfer's causal mask, whose last query stands at the last key, as long as all
pages that the queries' own tokens lie in are listed.

In a CUDA graph FlashInfer sizes its tiles of queries for the worst batch of so many rows, unless every request has the
same number of them: so there each sequence's queries are padded to one number.

FlashInfer gives neither the weights of blocks nor takes group means: the Triton kernels do.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE = (
    256 << 20
)  # bytes, for partial results; FlashInfer asks for 128 MiB, a large captured batch takes more


@dataclass(frozen=True)
class Requests:
    """What FlashInfer is told, on the CPU, int32.

    query_starts: [requests + 1], first query row of each. page_starts: [requests + 1], where its pages begin in
    `pages`, in which a listed page is page * kv_heads + head. last_lengths: [requests] tokens in the last page; 0
    without pages. by_head: whether these are reads over lists. order: [rows] int64, where FlashInfer's rows stand in
    the queries, which are seen as [tokens * kv_heads, group, dim] if by_head; None: as they are. back: [tokens] int64,
    where each token's row stands in FlashInfer's, of requests that are padded to `padded` queries each.
    """

    query_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_lengths: Tensor
    order: Tensor | None = None
    by_head: bool = False
    back: Tensor | None = None
    padded: int = 0

    @property
    def rows(self) -> int:
        return int(self.query_starts[-1])


def dense_requests(
    block_tables: Tensor, kv_lengths: Tensor, query_starts: Tensor, page_size: int
) -> Requests:
    """A request a sequence; one without queries reads nothing.

    block_tables [sequences, max_pages], kv_lengths [sequences], query_starts [sequences + 1]: int32, on the CPU, as for
    `kernels.paged_attention.paged_attention`. Nothing that is returned shares their memory.
    """
    lengths = kv_lengths.where(query_starts.diff() > 0, 0)
    return Requests(query_starts.clone(), *_all_pages(block_tables, lengths, page_size))


def padded_requests(
    block_tables: Tensor, kv_lengths: Tensor, query_starts: Tensor, page_size: int, queries: int
) -> Requests:
    """A request a sequence, of `queries` queries each, the last of them its own; no sequence has more.

    What stands before its own are rows of other sequences, whose results are dropped. A sequence without queries reads
    one token of page 0. The rest as for `dense_requests`; `back` is [sequences * queries], 0 for rows that are none's.
    """
    counts = query_starts.diff()
    there = counts > 0
    tables, lengths = block_tables.where(there[:, None], 0), kv_lengths.where(there, 1)
    places = len(counts)
    order = query_starts[1:, None].long() - queries + torch.arange(queries)
    sequence = torch.repeat_interleave(torch.arange(places), counts)
    row = torch.arange(len(sequence))
    back = torch.zeros(places * queries, dtype=torch.int64)
    back[: len(row)] = (sequence + 1) * queries - (query_starts[sequence + 1] - row)
    return Requests(
        torch.arange(places + 1, dtype=torch.int32) * queries,
        *_all_pages(tables, lengths, page_size),
        order=order.clamp(min=0).flatten(),
        back=back,
        padded=queries,
    )


def _all_pages(block_tables: Tensor, lengths: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`Requests.page_starts`, pages and last_lengths of whole sequences."""
    counts = -(-lengths // page_size)
    width = int(counts.max()) if len(counts) else 0
    read = torch.arange(width) < counts[:, None]
    return _starts(counts), block_tables[:, :width][read], _in_last_page(lengths, page_size)


def listed_requests(
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    page_size: int,
    lists: Tensor,
    counts: Tensor,
    block_size: int,
) -> Requests:
    """A request a (sequence, KV head); those without queries or with an empty list have no rows, and give zeros.

    lists [sequences, kv_heads, width], counts [sequences, kv_heads]: int32, on the CPU, as in
    `kernels.paged_attention.BlockLists`, in any order; blocks beyond a sequence's last token are not read. The rest as
    for `dense_requests`.
    Raises ValueError if a list leaves out a block that queries stand in, NotImplementedError if blocks are no pages.
    """
    if block_size != page_size:
        raise NotImplementedError(
            f"FlashInfer over lists of blocks of {block_size} tokens: expected pages, {page_size} tokens; use the "
            "triton backend"
        )
    kv_heads = lists.shape[1]
    queries = query_starts.diff()
    present = (-(-kv_lengths // page_size)).where(queries > 0, 0)[:, None, None]
    read = (torch.arange(lists.shape[2]) < counts[..., None]) & (lists < present)
    beyond = torch.iinfo(torch.int32).max
    blocks = lists.where(read, beyond).sort(-1).values  # the last pages last: the mask counts from there
    read = blocks < beyond
    reads = read.sum(-1, dtype=torch.int32)
    _check_own_blocks(blocks, read, reads, kv_lengths, queries, page_size)
    pages = block_tables.gather(1, blocks.where(read, 0).flatten(1).long()).view_as(blocks)
    heads = torch.arange(kv_heads, dtype=torch.int32)
    rows = queries[:, None].where(reads > 0, 0).flatten()
    lengths = kv_lengths[:, None].where(reads > 0, 0).flatten()
    return Requests(
        _starts(rows),
        _starts(reads.flatten()),
        (pages * kv_heads + heads[:, None])[read],
        _in_last_page(lengths, page_size),
        _row_order(query_starts, rows, kv_heads),
        by_head=True,
    )


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])


def _in_last_page(lengths: Tensor, page_size: int) -> Tensor:
    return ((lengths - 1) % page_size + 1).where(lengths > 0, 0).int()


def _row_order(query_starts: Tensor, rows: Tensor, kv_heads: int) -> Tensor:
    """`Requests.order` of requests that have so many rows each, as many as their sequence has queries, or none."""
    request = torch.repeat_interleave(torch.arange(len(rows)), rows)
    row = torch.arange(len(request)) - _starts(rows)[request]
    return (query_starts[request // kv_heads].long() + row) * kv_heads + request % kv_heads


def _check_own_blocks(
    blocks: Tensor, read: Tensor, reads: Tensor, kv_lengths: Tensor, queries: Tensor, page_size: int
) -> None:
    """Every list that is not empty holds the blocks from that of the first query on; sorted, they are its last ones."""
    first = ((kv_lengths - queries) // page_size)[:, None]
    own = (-(-kv_lengths // page_size))[:, None] - first
    listed = ((blocks >= first[..., None]) & read).sum(-1)
    lacking = (listed < own) & (reads > 0)
    if lacking.any():
        sequence, head = (int(i) for i in lacking.nonzero()[0])
        begin, count = int(first[sequence, 0]), int(own[sequence, 0])
        there = set(blocks[sequence, head][read[sequence, head]].tolist())
        missing = [block for block in range(begin, begin + count) if block not in there]
        raise ValueError(
            f"FlashInfer over lists: the list of sequence {sequence}, KV head {head} lacks blocks {missing}, in which "
            f"its {int(queries[sequence])} queries stand; list them, or use the triton backend"
        )


@dataclass
class Planned:
    """A wrapper of FlashInfer's and what it was planned for last.

    captured: its launches can be replayed as a graph after another plan, of as many requests and no more rows than the
    first. padded: what its requests are to be padded to; 0: as they are.
    """

    wrapper: Any
    device: torch.device
    captured: bool = False
    padded: int = 0
    requests: Requests | None = None
    order: Tensor | None = (
        None  # of `requests`, on the device, as is `back`; always the same tensors if captured
    )
    back: Tensor | None = None
    copied: torch.cuda.Event | None = None


def check_flashinfer(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises NotImplementedError or ValueError for what FlashInfer cannot run, RuntimeError if it is not installed."""
    if dim not in HEAD_DIMS:
        raise NotImplementedError(
            f"FlashInfer: heads of {dim} dimensions; it takes {', '.join(map(str, HEAD_DIMS))}; use the triton backend"
        )
    if dtype not in DTYPES:
        raise NotImplementedError(
            f"FlashInfer: {dtype}; it takes bfloat16 and float16; choose such a dtype, or the triton backend"
        )
    if device.type != "cuda":
        raise ValueError(f"FlashInfer runs on CUDA devices, this is {device.type!r}; use the torch backend")
    _flashinfer()


def check_no_flashinfer(operation: str, backend: str) -> None:
    """Raises NotImplementedError where the weights of blocks are asked of FlashInfer."""
    if backend == "flashinfer":
        raise NotImplementedError(
            f"{operation}: backend 'flashinfer' gives no weights of blocks; use 'triton' or 'torch'"
        )


def _flashinfer() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise RuntimeError(
            "the attention backend 'flashinfer' needs FlashInfer, which is not installed: pip install "
            "flashinfer-python, or choose triton"
        ) from error
    return flashinfer


def make_workspace(device: torch.device) -> Tensor:
    """For partial results; wrappers that run one after another on one stream share it."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def make_planned(workspace: Tensor) -> Planned:
    """For launches that follow their plan, of any batch. Captured in a graph, they stay as they were planned."""
    wrapper = _flashinfer().BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
    return Planned(wrapper, workspace.device)


def make_captured(workspace: Tensor, sequences: int, queries: int, pages: int) -> Planned:
    """For dense launches in a graph that is replayed after other plans; always so many sequences, of no more queries
    each and of no more `pages` in all. The first plan, before the capture, fills all rows."""

    def buffer(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=workspace.device)

    wrapper = _flashinfer().BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        "HND",
        use_cuda_graph=True,
        qo_indptr_buf=buffer(sequences + 1),
        paged_kv_indptr_buf=buffer(sequences + 1),
        paged_kv_indices_buf=buffer(pages),
        paged_kv_last_page_len_buf=buffer(sequences),
        backend="fa2",
    )
    planned = Planned(wrapper, workspace.device, captured=True)
    if sequences > 1 and queries > 1:  # otherwise the worst batch has no longer sequence than others
        planned.padded = queries
        planned.order, planned.back = torch.zeros(
            2, sequences * queries, dtype=torch.int64, device=workspace.device
        )
    return planned


def plan(
    planned: Planned,
    requests: Requests,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    scale: float,
    dtype: torch.dtype,
) -> None:
    """Decide how the work is split and bring it to the device. heads, kv_heads: of the model.

    Compiles FlashInfer's kernels for (dtype, dim) when it is first called for them, unless they come prebuilt
    (flashinfer-jit-cache): that takes ninja, nvcc and a minute or more.
    """
    assert requests.padded == planned.padded
    by_head = requests.by_head
    planned.requests = requests
    if not requests.rows and not planned.captured:
        return  # FlashInfer divides by what there is; `run` gives zeros
    if planned.copied is not None:
        planned.copied.synchronize()  # FlashInfer writes its pinned buffer again, without waiting
    planned.wrapper.plan(
        requests.query_starts,
        requests.page_starts,
        requests.pages,
        requests.last_lengths,
        heads // kv_heads if by_head else heads,
        1 if by_head else kv_heads,
        dim,
        page_size,
        causal=True,
        sm_scale=scale,
        q_data_type=dtype,
        kv_data_type=dtype,
        **({"uniform_q_len": requests.padded} if requests.padded else {}),
    )
    if not planned.padded:
        planned.order = None if requests.order is None else requests.order.to(planned.device)
    else:
        assert planned.order is not None and planned.back is not None
        assert requests.order is not None and requests.back is not None
        planned.order.copy_(requests.order)
        planned.back.copy_(requests.back)
    planned.copied = planned.copied or torch.cuda.Event()
    planned.copied.record()


def run(planned: Planned, queries: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
    """Attend as planned. queries: [tokens, heads, dim]; what those behind the planned ones get may be anything.

    k_pages, v_pages: [pages, kv_heads, page_size, dim], contiguous. Returns [tokens, heads, dim].
    """
    requests = planned.requests
    assert requests is not None, "run comes after plan"
    if planned.padded:
        assert planned.order is not None and planned.back is not None
        padded = queries.index_select(0, planned.order)
        out = planned.wrapper.run(padded, (k_pages, v_pages), out=torch.empty_like(padded))
        return out.index_select(0, planned.back)
    out = torch.zeros_like(queries)
    rows = requests.rows
    if not rows:
        return out
    if planned.order is None:
        planned.wrapper.run(queries[:rows], (k_pages, v_pages), out=out[:rows])
        return out
    kv_heads, dim = k_pages.shape[1], queries.shape[2]
    by_kv_head = queries.reshape(-1, queries.shape[1] // kv_heads, dim)
    arranged = by_kv_head.index_select(0, planned.order)
    result = run_arranged(planned, arranged, k_pages, v_pages, torch.empty_like(arranged))
    out.view_as(by_kv_head).index_copy_(0, planned.order, result)
    return out


def run_arranged(planned: Planned, queries: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> Tensor:
    """The same over lists, of queries in FlashInfer's order: [rows, group, dim], and so is `out`, which it fills."""
    pages = tuple(each.view(-1, 1, *each.shape[2:]) for each in (k_pages, v_pages))
    return planned.wrapper.run(queries, pages, out=out)


def attend_planning(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    lists: Tensor | None = None,
    counts: Tensor | None = None,
    block_size: int = 0,
) -> Tensor:
    """Plan and run at once, from tensors of the device, which are fetched for that: it waits for the device.

    lists, counts, block_size: of a BlockLists; dense without. The rest as for `paged_attention`.
    """
    heads, dim = queries.shape[1:]
    kv_heads, page_size = k_pages.shape[1:3]
    check_flashinfer(dim, queries.dtype, queries.device)
    layout = block_tables.cpu(), kv_lengths.cpu(), query_starts.cpu(), page_size
    if lists is None or counts is None:
        requests = dense_requests(*layout)
    else:
        requests = listed_requests(*layout, lists.cpu(), counts.cpu(), block_size)
    planned = _planned_of(queries.device)
    plan(planned, requests, heads, kv_heads, dim, page_size, scale, queries.dtype)
    return run(planned, queries, k_pages, v_pages)


@lru_cache
def _planned_of(device: torch.device) -> Planned:
    with torch.inference_mode(False):  # whose tensors could not be written again outside of it
        return make_planned(make_workspace(device))
