"""Memory of a neighbour GPU of the same machine, which kernels of the model's own GPU read and write in place.

Knows nothing of pages: who lays them out there is engine.tiered_kv.
"""

import math
import os

import torch
from torch import Tensor

from engine.paged_kv import PAGE_SIZE

NEXT = -1  # for a neighbour's index: the one after the model's own GPU
_PROBE = 1 << 20  # numbers that are written there and read back before it is trusted


def peer_pages(
    layers: int,
    pages: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    index: int = NEXT,
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each layer, [pages, kv_heads, PAGE_SIZE, head_dim], in the memory of another GPU.

    device: the model's. index: the other's, among those that the process sees; negative: the next one. On a CPU its own
    memory stands for a neighbour's, to test with.
    Raises ValueError for a GPU that there is not or that `device` cannot reach, MemoryError if it has no room.
    """
    neighbour = open_neighbour(device, index) if device.type == "cuda" else device
    shape = pages, kv_heads, PAGE_SIZE, head_dim
    size = 2 * layers * math.prod(shape) * dtype.itemsize
    try:
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=neighbour) for _ in range(layers)] for _ in range(2)
        )
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(neighbour)[0]
        raise MemoryError(
            f"{neighbour} has no {size / 2**30:.1f} GiB for KV, {free / 2**30:.1f} GiB of it are free: lower "
            "--peer-kv-memory, or choose another --peer-gpu"
        ) from None
    if neighbour.type == "cuda":
        torch.cuda.synchronize(neighbour)  # its streams and those of `device` do not wait for each other
    return keys, values


def open_neighbour(device: torch.device, index: int = NEXT) -> torch.device:
    """The GPU of that index, whose memory kernels on the GPU `device` may read and write from now on."""
    settings = ",".join(
        os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    if "expandable_segments:true" in settings.replace(" ", "").lower():
        raise ValueError(
            "--peer-kv-memory with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF is not built: such memory is "
            "mapped piece by piece for each GPU that reaches it; unset one of them"
        )
    own = torch.cuda.current_device() if device.index is None else device.index
    chosen = neighbour_index(own, torch.cuda.device_count(), index)
    if not torch.cuda.can_device_access_peer(own, chosen):
        raise ValueError(
            f"cuda:{own} ({torch.cuda.get_device_name(own)}) cannot reach the memory of cuda:{chosen} "
            f"({torch.cuda.get_device_name(chosen)}): choose another --peer-gpu (`nvidia-smi topo -p2p r` says which "
            "can), or leave --peer-kv-memory out"
        )
    # Access is off until it is enabled, which torch does at its first copy between two GPUs: for the GPU that a copy
    # begins on to the memory where it ends. So it must be one from here to there.
    here = torch.arange(_PROBE, device=torch.device("cuda", own))
    if not torch.equal(here.to(torch.device("cuda", chosen)).to(here.device), here):
        raise ValueError(
            f"what cuda:{own} wrote to the memory of cuda:{chosen} is not what it read back: peer access between them "
            "does not work on this machine (an IOMMU may be in the way); leave --peer-kv-memory out"
        )
    return torch.device("cuda", chosen)


def neighbour_index(own: int, count: int, index: int = NEXT) -> int:
    """Raises ValueError unless that is another of the `count` GPUs that the process sees."""
    if count < 2:
        raise ValueError(
            f"--peer-kv-memory is memory of another GPU than the model's, and the process sees {count}: let it see "
            "two (CUDA_VISIBLE_DEVICES), or leave --peer-kv-memory out"
        )
    chosen = (own + 1) % count if index < 0 else index
    if chosen == own or chosen >= count:
        raise ValueError(
            f"--peer-gpu {chosen}: the model is on GPU {own} of the {count} that the process sees, expected another "
            f"of 0 … {count - 1}"
        )
    return chosen
