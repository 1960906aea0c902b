"""Causal attention of ragged queries over paged KV: dense, or over block lists per (sequence, KV head).

For blocks that a list leaves out, the mean key and value of their group of tokens may stand in, weighted by how many
of the group's tokens are not read, in the same softmax. The weight of n keys
k_i under a query q is n · mean(exp(q·k_i)); with the keys' variances that is, to second order,
n · exp(q·k̄ + ½ Σ q_d² var_d).

`reference` is the torch twin; `launch` runs the Triton kernel of `kernel`, by the work that `work` shares out on the
device; `weights` turns what the kernel leaves into the softmax weights of blocks.
"""

from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.paged_attention.inputs import VARIANCE_LIMIT, Batch, BlockLists, GroupMeans, check_batch
from specahead.kernels.paged_attention.launch import attend_in_triton, takes_heads
from specahead.kernels.paged_attention.reference import (
    attend_in_torch,
    gather_pages,
    pack_heads,
    pool_blocks,
    remember_weights_of_all_in_torch,
    weights_of_last_queries,
)
from specahead.kernels.paged_attention.weights import LayersEvidence, remember_weights_of_all, weights_of_listed
from specahead.kernels.paged_attention.work import LEAST_ROWS, MAX_ROWS, Tuning, Work, pinned_tuning, plan_work

__all__ = [
    "LEAST_ROWS",
    "MAX_ROWS",
    "VARIANCE_LIMIT",
    "Batch",
    "BlockLists",
    "GroupMeans",
    "LayersEvidence",
    "Tuning",
    "Work",
    "gather_pages",
    "pack_heads",
    "paged_attention",
    "paged_attention_remembering",
    "paged_attention_with_read_weights",
    "pinned_tuning",
    "plan_work",
    "pool_blocks",
    "takes_heads",
    "weights_of_last_queries",
]


def paged_attention(
    batch: Batch,
    blocks: BlockLists | None = None,
    means: GroupMeans | None = None,
    backend: Backend = "torch",
    work: Work | None = None,
) -> Tensor:
    """Attend, and return [tokens, heads, head_dim]; zeros for a query that sees nothing.

    blocks: the blocks to read; None: all. means: stand-ins for the other blocks; None: nothing stands in
    work: for Triton, the result of `plan_work`; None: it is made here
    Raises NotImplementedError for head dimensions that Triton does not take.
    """
    check_batch(batch, blocks, means)
    if backend == "triton":
        return attend_in_triton(batch, blocks, means, work)[0]
    return attend_in_torch(batch, blocks, means)[0]


def paged_attention_with_read_weights(
    batch: Batch,
    blocks: BlockLists,
    means: GroupMeans | None = None,
    backend: Backend = "torch",
    work: Work | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `paged_attention` over lists, and how much softmax weight each listed block got.

    The weights are [sequences, kv_heads, width] float32, in the order of `blocks.lists`: the sum over the query
    heads of a KV head of the mean over a sequence's queries; 0 past a list's count.
    weights_out: where to put them, if given. The other arguments and errors: as for `paged_attention`.
    """
    check_batch(batch, blocks, means)
    if backend == "triton":
        out, sums = attend_in_triton(batch, blocks, means, work, blocks.block_size)
        return out, weights_of_listed(batch, sums, blocks, weights_out)
    out, weights = attend_in_torch(batch, blocks, means, emit=True)
    assert weights is not None
    return out, weights if weights_out is None else weights_out.copy_(weights)


def paged_attention_remembering(
    batch: Batch,
    block_size: int,
    memory: Tensor,
    places: Tensor,
    decay: float,
    backend: Backend = "torch",
    work: Work | None = None,
) -> Tensor:
    """Attend densely, and remember how much softmax weight each block got, in place.

    A remembered weight fades by `decay` and is raised to the new weight; it is 0 after a sequence's blocks. Weights
    are summed and averaged as by `paged_attention_with_read_weights`.

    memory: [places, kv_heads, blocks] float32, its last dimension contiguous. places: [sequences] int32, all different,
    where in it each sequence's weights are; nothing is remembered at a negative one.
    Returns the output [tokens, heads, head_dim].
    """
    check_batch(batch)
    if backend == "triton":
        out, sums = attend_in_triton(batch, None, None, work, block_size)
        remember_weights_of_all(batch, sums, memory, places, decay)
        return out
    remember_weights_of_all_in_torch(batch, block_size, memory, places, decay)
    return attend_in_torch(batch)[0]
