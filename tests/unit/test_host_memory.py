"""Host memory that is the home of KV: what it is, and what is said when the host has none."""

from typing import Any

import pytest
import torch

import specahead.engine.kv.host_memory as host_memory
from specahead.engine.kv.host_memory import host_zeros, parse_cpu_list

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5", {5}),
        ("7-7", {7}),
        ("0,2,4", {0, 2, 4}),
        ("\n", set()),
        ("", set()),
    ],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_of_every_shape(dtype: torch.dtype) -> None:
    for shape in ((3, 2, 16, 5), (1,), (0, 4)):
        memory = host_zeros(shape, dtype, CPU)
        assert (memory.shape, memory.dtype, memory.is_contiguous()) == (shape, dtype, True)
        assert not memory.any()
        memory += 1
        assert bool((memory == 1).all())


def test_a_host_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "_Memory", refuse)
    with pytest.raises(MemoryError, match=r"no 3.0 GiB .*Cannot allocate memory.*lower --host-kv-memory.*ulimit -l"):
        host_zeros((3, 2**28), torch.float32, CPU)


@pytest.mark.gpu
def test_a_gpu_reaches_it_in_place() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    memory = host_zeros((5, 4096), torch.float32, torch.device("cuda"))
    assert memory.is_pinned()
    assert float(memory.cuda(non_blocking=True).sum()) == 0
