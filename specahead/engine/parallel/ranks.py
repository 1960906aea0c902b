"""The ranks that run one model together, and the sums over them. Knows no models and no passes."""

import os
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from specahead.engine.parallel.commands import NOBODY, Followers
from specahead.engine.parallel.small_sums import SmallSums, meet_in_memory
from specahead.kernels.compiling import compiles_only


@dataclass(frozen=True)
class Ranks:
    """One process's place among the ranks. Sums are over torch.distributed's default group (`join`)."""

    rank: int = 0
    """The number of this process, from 0."""
    count: int = 1
    """How many ranks there are; 1: the model runs in this process alone, and sums are what they are over."""
    followers: Followers = field(default=NOBODY, repr=False, compare=False)
    """The ranks that do what rank 0 tells them; a rank that follows has none."""

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks, in place, and return it: the same bits on every rank. Launches only.

        Between GPUs small tensors take the way of SmallSums, by their dtype, size and layout alone; others take NCCL's.
        """
        # Launches that are only compiled have tensors without memory.
        if self.is_alone or compiles_only():
            return tensor
        if _small_sums is not None and _small_sums.takes(tensor):
            _small_sums.add_up(tensor)
        else:
            dist.all_reduce(tensor)
        return tensor

    def share(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of rank 0. Launches only."""
        if not self.is_alone and not compiles_only():
            dist.broadcast(tensor, 0)

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers. Waits for all ranks."""
        if self.is_alone:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        least = torch.tensor(number, dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def own(self, count: int) -> slice:
        """Return which of `count` heads or columns of the model are this rank's own; `count` is a multiple of ranks."""
        each = count // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def widened(self, own: Tensor) -> Tensor:
        """Return a tensor [_, _, heads of all ranks, …] with this rank's own values and 0 elsewhere."""
        if self.is_alone:
            return own
        rows, sequences, heads, *rest = own.shape
        wide = own.new_zeros(rows, sequences, heads * self.count, *rest)
        wide[:, :, self.rank * heads : (self.rank + 1) * heads] = own
        return wide


ALONE = Ranks()
_small_sums: SmallSums | None = None  # of the group that this process has joined, as torch's default group is
# Ranks are on one machine, and meet on its loopback. Multicast over NVLink is often off where GPUs are shared out. The
# buffers of graphs are not registered: they may lie in segments that grow (specahead.config.process).
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_GRAPH_REGISTER": "0"}
if sys.platform == "linux":
    _ENVIRONMENT |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def join(ranks: Ranks, port: int, device: torch.device) -> None:
    """Join torch.distributed's default group, which must not exist yet: NCCL between GPUs, else gloo.

    Waits for all ranks. port: of the store that rank 0 keeps on this machine. What the environment already says of
    NCCL, symmetric memory and gloo stays.
    """
    global _small_sums
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    store = dist.TCPStore("127.0.0.1", port)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        device_id = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", store=store, rank=ranks.rank, world_size=ranks.count, device_id=device_id)
    else:
        dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.count)
    ranks.sum(torch.zeros(1, device=device))  # NCCL connects with the first sum, which no graph can capture
    if device.type == "cuda":
        _small_sums = meet_in_memory(ranks.rank, ranks.count, ranks.least)


def leave() -> None:
    """Leave the group that `join` has joined, as all its ranks do. No graph with sums may be replayed any more."""
    global _small_sums
    _small_sums = None
    dist.destroy_process_group()
