"""Host memory that a GPU reads and writes in place."""

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros on the host; for a CUDA device page-locked, on the NUMA node that the device is attached to.

    torch's own pinned memory is not used, since its allocator rounds sizes up to powers of two. Raises MemoryError if
    the host refuses.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = _Memory(-1, size)
    except OSError as error:
        raise MemoryError(_refusal(size, str(error))) from None
    if device.type == "cuda":
        with _near(device):  # registering touches the pages, which puts them on the node that this thread runs on
            address = np.frombuffer(memory, np.uint8).ctypes.data
            error_code = torch.cuda.cudart().cudaHostRegister(address, size, _REGISTER_FLAGS)  # type: ignore[attr-defined]
        if int(error_code) != 0:
            raise MemoryError(_refusal(size, f"cudaHostRegister: {error_code}"))
        memory.locked_at = address
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class _Memory(mmap.mmap):
    """Host memory that is unlocked before it is freed, since its addresses may be used again."""

    locked_at = 0

    def __del__(self) -> None:
        if self.locked_at and not sys.is_finalizing():
            torch.cuda.synchronize()  # what still reads or writes it
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)  # type: ignore[attr-defined]


def _refusal(size: int, why: str) -> str:
    return (
        f"the host gives no {size / 2**30:.1f} GiB of page-locked memory ({why}): lower --host-kv-memory, or raise the "
        "limits on memory and locked memory (ulimit -l, the container's memory limit)"
    )


@contextlib.contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """Run on the CPUs of the device's NUMA node, if the system names them."""
    before = os.sched_getaffinity(0)
    local = _local_cpus(device) & before
    if local:
        os.sched_setaffinity(0, local)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _local_cpus(device: torch.device) -> set[int]:
    properties: Any = torch.cuda.get_device_properties(device)
    bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    file = Path("/sys/bus/pci/devices") / bus_id / "local_cpulist"
    try:
        return parse_cpu_list(file.read_text())
    except OSError:
        return set()


def parse_cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list in Linux's notation, such as 0-3,8,10-11."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
