"""Causal dense attention over paged KV by FlashInfer (its FA2 kernels), the rival of benchmarks.

A pass is planned on the host once (`plan`) and then run for each layer (`run`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
WORKSPACE = 256 << 20  # bytes for partial results; FlashInfer asks for 128 MiB at least


@dataclass(frozen=True)
class Requests:
    """What FlashInfer is told of a batch: int32 tensors on the CPU.

    query_starts: [requests + 1], the first query row of each request
    page_starts: [requests + 1], where each request's pages begin in `pages`
    pages: [all pages that are read], page numbers
    last_lengths: [requests], tokens in the last page of each; 0 for a request without pages
    """

    query_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_lengths: Tensor

    @property
    def rows(self) -> int:
        return int(self.query_starts[-1])


@dataclass
class Planned:
    """A wrapper of FlashInfer's and what it was planned for last. `copied` is recorded once the plan is on the GPU."""

    wrapper: Any
    requests: Requests | None = None
    copied: torch.cuda.Event | None = None


def dense_requests(block_tables: Tensor, kv_lengths: Tensor, query_starts: Tensor, page_size: int) -> Requests:
    """Return one request for each sequence; a sequence without queries reads nothing.

    block_tables [sequences, max_pages], kv_lengths [sequences], query_starts [sequences + 1]: int32, on the CPU, as for
    `specahead.kernels.paged_attention.paged_attention`. The result shares no memory with them.
    """
    lengths = kv_lengths.where(query_starts.diff() > 0, 0)
    counts = -(-lengths // page_size)
    width = int(counts.max()) if len(counts) else 0
    read = torch.arange(width) < counts[:, None]
    last_lengths = ((lengths - 1) % page_size + 1).where(lengths > 0, 0).int()
    return Requests(query_starts.clone(), starts_of(counts), block_tables[:, :width][read], last_lengths)


def starts_of(counts: Tensor) -> Tensor:
    """Return where each of several runs of these lengths begins, and where the last one ends: [n + 1] int32."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])


def make_workspace(device: torch.device) -> Tensor:
    """Return room for partial results; wrappers that run one after another on one stream share it."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def make_planned(workspace: Tensor) -> Planned:
    """Return a wrapper for batches of any shape. Launches captured in a CUDA graph stay as they were planned."""
    import flashinfer  # installed or not, all else runs

    return Planned(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2"))


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
    """Decide how the work of `requests` is split, and bring that to the device.

    When it is first called for a (dtype, dim) FlashInfer compiles its kernels, unless they come prebuilt
    (flashinfer-jit-cache): that takes ninja, nvcc and a minute or more.
    """
    planned.requests = requests
    if not requests.rows:
        return  # FlashInfer divides by the number of rows; `run` gives zeros
    if planned.copied is not None:
        planned.copied.synchronize()  # FlashInfer writes its pinned buffer again, without waiting
    planned.wrapper.plan(
        requests.query_starts,
        requests.page_starts,
        requests.pages,
        requests.last_lengths,
        heads,
        kv_heads,
        dim,
        page_size,
        causal=True,
        sm_scale=scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    planned.copied = planned.copied or torch.cuda.Event()
    planned.copied.record()


def run(planned: Planned, queries: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
    """Attend as planned, and return [tokens, heads, dim]; rows behind the planned ones are zeros.

    queries: [tokens, heads, dim]; k_pages, v_pages: [pages, kv_heads, page_size, dim], contiguous
    """
    requests = planned.requests
    assert requests is not None, "run comes after plan"
    out = torch.zeros_like(queries)
    rows = requests.rows
    if rows:
        planned.wrapper.run(queries[:rows], (k_pages, v_pages), out=out[:rows])
    return out
