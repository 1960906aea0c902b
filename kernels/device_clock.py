"""What time it is on the device when a stream gets there, for measurements inside of captured steps."""

import time

from torch import Tensor

from kernels.backends import check_backend, jit, tl


def stamp_time(out: Tensor, index: int, backend: str = "torch") -> None:
    """out[index] = nanoseconds since some moment, by the device's clock. out: [n] int64"""
    check_backend("stamp_time", backend, ("torch", "triton"))
    if backend == "torch":
        out[index] = time.perf_counter_ns()
        return
    _stamp_time_kernel[(1,)](out, index, num_warps=1)


@jit
def _stamp_time_kernel(out_ptr, index):
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(out_ptr + index, now)
