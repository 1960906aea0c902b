"""Host memory that is the home of KV: what it is, and what is said when the host has none."""

import pytest
import torch

from specahead.engine.kv.host_memory import host_zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_of_every_shape(dtype: torch.dtype) -> None:
    for shape in ((3, 2, 16, 5), (1,), (0, 4)):
        memory = host_zeros(shape, dtype, CPU)
        assert (memory.shape, memory.dtype, memory.is_contiguous()) == (shape, dtype, True)
        assert not memory.any()
        memory += 1
        assert bool((memory == 1).all())


@pytest.mark.gpu
def test_a_gpu_reaches_it_in_place() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    memory = host_zeros((5, 4096), torch.float32, torch.device("cuda"))
    assert memory.is_pinned()
    assert float(memory.cuda(non_blocking=True).sum()) == 0
