"""How much memory a process can still take: on the host, or on a GPU."""

import contextlib
import os
from pathlib import Path

import torch

# Of each version of cgroups: where a container's files lie, then limit, use, and the part of that which can be dropped.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(device: str = "cpu") -> int:
    """Return the bytes that can still be taken: on a GPU of its memory, else of the machine's, or of the container's
    where that has fewer left.
    """
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    left = [_free_in_machine()]
    for folder, limit, usage, droppable in _CGROUPS:
        # Not there, or without a limit ("max"), where there is no such cgroup.
        with contextlib.suppress(OSError, ValueError, KeyError):
            used = int(Path(folder, usage).read_text()) - _numbers(Path(folder, "memory.stat"))[droppable]
            left.append(int(Path(folder, limit).read_text()) - used)
    return max(0, min(left))


def _free_in_machine() -> int:
    try:
        return _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except (OSError, KeyError):  # another system than Linux, which tells only what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _numbers(file: Path) -> dict[str, int]:
    """Return the number that follows the first word of each line."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}
