"""Causal attention of ragged queries over paged KV: dense, or over block lists per (sequence, KV head).

Blocks that a list leaves out may be stood in for by the mean key and value of the group of tokens that they
belong to, weighted by how many of the group's tokens are not read, in the same softmax. The weight of n keys
k_i under a query q is n · mean(exp(q·k_i)); with the keys' variances that is, to second order,
n · exp(q·k̄ + ½ Σ q_d² var_d).

`reference` is the torch twin; `launch` runs the Triton kernel of `kernel`, by the work that `work` shares out on the
device; `weights` turns what the kernel leaves into the softmax weights of blocks.
"""

from torch import Tensor

from kernels.backends import check_backend
from kernels.paged_attention.inputs import MAX_VARIANCE_TERM, Batch, BlockLists, GroupMeans, check_batch
from kernels.paged_attention.launch import attend_emitting, attend_in_triton
from kernels.paged_attention.reference import attend_in_torch, gather_pages, pack_heads
from kernels.paged_attention.weights import weights_of_listed
from kernels.paged_attention.work import MAX_ROWS, Tuning, Work, pinned_tuning, plan_work

__all__ = [
    "MAX_ROWS",
    "MAX_VARIANCE_TERM",
    "Batch",
    "BlockLists",
    "GroupMeans",
    "Tuning",
    "Work",
    "gather_pages",
    "pack_heads",
    "paged_attention",
    "paged_attention_with_read_weights",
    "pinned_tuning",
    "plan_work",
]


def paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists | None = None,
    means: GroupMeans | None = None,
    backend: str = "torch",
    max_queries: int = 0,
    work: Work | None = None,
) -> Tensor:
    """Attend, and return [tokens, heads, head_dim]; a query that may see nothing gets zeros.

    The last queries of a sequence stand at its last KV positions.
    queries: [tokens, heads, head_dim], the sequences one after another
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    block_tables: [sequences, max_pages] int32, page of each logical page
    kv_lengths: [sequences] int32, tokens with KV, the queries' own included
    query_starts: [sequences + 1] int32, first query row of each sequence
    blocks: what is read; everything if None. means: what stands in for the rest; nothing if None
    max_queries: for Triton, no sequence has more queries. work: for Triton, of `plan_work`; made here if None
    Raises ValueError for shapes that do not fit one another, NotImplementedError for what Triton does not take.
    """
    check_backend("paged_attention", backend, ("torch", "triton"))
    batch = Batch(queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale)
    check_batch(batch, blocks, means)
    if backend == "triton":
        return attend_in_triton(batch, blocks, means, max_queries, work)
    return attend_in_torch(batch, blocks, means)[0]


def paged_attention_with_read_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists,
    means: GroupMeans | None = None,
    backend: str = "torch",
    max_queries: int = 0,
    work: Work | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `paged_attention` over lists returns, and how much softmax weight each listed block got.

    The weights are [sequences, kv_heads, width] float32, in the order of `blocks.lists`: the sum over the query
    heads of a KV head of the mean over a sequence's queries; 0 past a list's count.
    weights_out: where to put them, if given. The other arguments and what is raised: as for `paged_attention`.
    """
    check_backend("paged_attention_with_read_weights", backend, ("torch", "triton"))
    batch = Batch(queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale)
    check_batch(batch, blocks, means)
    if backend == "triton":
        out, sums = attend_emitting(batch, blocks, means, max_queries, work, blocks.block_size)
        return out, weights_of_listed(batch, sums, blocks, weights_out)
    out, weights = attend_in_torch(batch, blocks, means, emit=True)
    assert weights is not None
    return out, weights if weights_out is None else weights_out.copy_(weights)
