"""Sums of small tensors over ranks whose GPUs reach each other's memory: two kernels a sum. Knows no models.

A step has two sums a layer, over few rows. NCCL takes longer to coordinate such a sum than to move it. Here each rank
copies its tensor to its part of symmetric memory, waits for the others to have done so, and reads the parts of all
(torch's one-shot all-reduce). The kernel adds parts up in the order of ranks, whichever rank it runs on, and rounds
after each, so the sum has the same bits everywhere. It takes no NVLink multicast. The reference is
`torch.distributed.all_reduce`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

# Bytes that a rank reads in one sum, the parts of all ranks together. Beyond it the bytes should cost more than the
# waiting, and NCCL moves each part once. It was not measured.
MOST_BYTES = 2 * 2**20
_ALIGNMENT = 16  # bytes that a thread of the kernel moves at once
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds up


@dataclass(frozen=True)
class SmallSums:
    """The symmetric memory of one group of ranks."""

    part: Tensor
    """[bytes] uint8: this rank's part, which all ranks read."""
    group: str
    """The name of the group in torch.distributed."""
    met: ClassVar[bool] = False
    """Whether this process has met other ranks in symmetric memory before."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether `add_up` takes a tensor, by dtype, size and layout, which are the same on all ranks."""
        return (
            tensor.dtype in _DTYPES
            and 0 < tensor.nbytes <= len(self.part)
            and tensor.is_contiguous()
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.storage_offset() * tensor.itemsize % _ALIGNMENT == 0
        )

    def add_up(self, tensor: Tensor) -> None:
        """Add up a tensor over the ranks, in place. Launches two kernels, which a CUDA graph can hold."""
        part = self.part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # A kernel of its own copies: torch's one_shot_all_reduce_copy lets a block tell the other ranks that its copy
        # is there before all its threads have made theirs. The product is by a kernel, a copy by a slower graph node.
        torch.mul(tensor, 1, out=part)
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self.group, tensor)


def meet_in_memory(rank: int, count: int, least: Callable[[int], int]) -> SmallSums | None:
    """Return the symmetric memory of torch.distributed's default group, on this process's current GPU.

    Waits for all ranks, which decide alike: None on all of them, and a line in the log, if one cannot take part. least:
    returns the least of the ranks' numbers. Ranks must be on neighbouring GPUs. Raises RuntimeError for a wrong sum.
    """
    reason = _what_forbids(rank, count)
    sums = None
    if least(int(not reason)):
        try:
            sums = _open(count)
        except RuntimeError as error:
            reason = str(error)
        if least(int(sums is not None)) and sums is not None:
            _check(sums, rank, count)
            return sums
    if rank == 0:
        log.warning("ranks add up all tensors by NCCL, since %s", reason or "another rank cannot share its memory")
    return None


def _what_forbids(rank: int, count: int) -> str:
    first = torch.cuda.current_device() - rank
    for one, other in permutations(range(first, first + count), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"cuda:{one} cannot reach the memory of cuda:{other}"
    # torch numbers the meetings of a process, and ranks that have just started count from 0.
    return "this process has been a rank of another group before" if SmallSums.met else ""


def _open(count: int) -> SmallSums:
    # Only several GPUs need these imports.
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous

    group = dist.group.WORLD
    assert group is not None
    SmallSums.met = True
    device = torch.device("cuda", torch.cuda.current_device())
    # torch's `empty` would take this from a memory pool, which expandable segments (specahead.config.process) rule out.
    part = _SymmetricMemory.empty_strided_p2p((MOST_BYTES // count,), (1,), torch.uint8, device)
    rendezvous(part, group)
    return SmallSums(part, group.group_name)


def _check(sums: SmallSums, rank: int, count: int) -> None:
    """Make the first sums, which load the kernels. Raises RuntimeError if one is wrong."""
    for dtype in _DTYPES:
        tensor = torch.full((64,), rank + 1, dtype=dtype, device=sums.part.device)
        sums.add_up(tensor)
        expected = count * (count + 1) // 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"ranks add up to {tensor.tolist()} through symmetric memory, and not to {expected}")
