"""Copying scattered blocks: both backends against a loop over rows."""

import pytest
import torch
from torch import Tensor

from specahead.kernels.kv_gather import gather_blocks, gather_layers, layer_copies, wait_for_layer

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
backends = pytest.mark.parametrize("backend", ["torch", "triton"])


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_bytes(rows: int, row_bytes: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator).view(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def on_host(tensor: Tensor) -> Tensor:
    """Where the kernel may read host memory: pinned if there is a GPU."""
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


@pytest.mark.parametrize(
    ("row_bytes", "dtype", "host"),
    [
        (1024, torch.bfloat16, "source"),
        (6144, torch.float32, "destination"),  # not a power of two
        (4112, torch.uint8, "source"),  # 16 bytes beyond one: a piece that is mostly masked off
        (65536, torch.float16, "source"),
    ],
)
@pytest.mark.parametrize(("count", "programs"), [(0, 3), (13, 2), (16, 40)])
@backends
def test_rows_arrive_and_no_others(
    backend: str, count: int, programs: int, row_bytes: int, dtype: torch.dtype, host: str
) -> None:
    n, m, capacity = 23, 19, 16
    sources = [random_bytes(n, row_bytes, dtype, seed) for seed in range(2)]
    before = [random_bytes(m, row_bytes, dtype, seed + 2) for seed in range(2)]
    torch.manual_seed(count)
    origins, places = torch.randint(n, (capacity,)), torch.randperm(m)[:capacity]
    origins[torch.rand(capacity) < 0.3] = -1  # passed over
    wanted = [tensor.clone() for tensor in before]
    for source, tensor in zip(sources, wanted, strict=True):
        for origin, place in zip(origins[:count].tolist(), places[:count].tolist(), strict=True):
            if origin >= 0:
                tensor[place] = source[origin]
    keys, values = (on_host(t) if host == "destination" else t.to(DEVICE, copy=True) for t in before)
    from_keys, from_values = (on_host(t) if host == "source" else t.to(DEVICE) for t in sources)
    moved = ints(origins.tolist()), ints(places.tolist()), ints([count])
    gather_blocks((from_keys, from_values), (keys, values), *moved, programs, backend)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert all(same_bytes(*both) for both in zip((keys, values), wanted, strict=True))


@backends
def test_layers_one_after_the_other(backend: str) -> None:
    """As gather_blocks for each; all programs have finished all of them, an empty one too."""
    layers, n, m, capacity, programs = 3, 23, 19, 16, 4
    torch.manual_seed(0)
    origins, places = (
        torch.randint(-1, n, (layers, capacity)),
        torch.stack([torch.randperm(m)[:capacity] for _ in range(layers)]),
    )
    counts = [13, 0, 16]
    sources = [[random_bytes(n, 1024, torch.bfloat16, 2 * layer + i) for i in range(2)] for layer in range(layers)]
    wanted = [[random_bytes(m, 1024, torch.bfloat16, 9 + 2 * layer + i) for i in range(2)] for layer in range(layers)]
    destinations = [tuple(tensor.to(DEVICE, copy=True) for tensor in pair) for pair in wanted]
    for layer, pairs in enumerate(zip(sources, wanted, strict=True)):
        for source, tensor in zip(*pairs, strict=True):
            for origin, place in zip(origins[layer, : counts[layer]], places[layer], strict=False):
                if origin >= 0:
                    tensor[place] = source[origin]
    done = torch.zeros(layers, dtype=torch.int32, device=DEVICE)
    home = [tuple(on_host(tensor) for tensor in pair) for pair in sources]
    copies = layer_copies(home, destinations, torch.device(DEVICE))
    lists = origins.int().to(DEVICE), places.int().to(DEVICE), ints(counts)
    gather_layers(copies, *lists, done, programs, backend)
    for layer in range(layers):
        wait_for_layer(done, layer, programs, backend)
    assert done.tolist() == [programs] * layers
    for got, pair in zip(destinations, wanted, strict=True):
        assert all(same_bytes(*both) for both in zip(got, pair, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_any_list() -> None:
    source = on_host(random_bytes(50, 4096, torch.bfloat16, 0))
    destination, other = torch.zeros(2, 40, 2048, dtype=torch.bfloat16, device=DEVICE)
    origins, places, count = ints([0] * 40), ints(list(range(40))), ints([1])
    call = ((source, source), (destination, other), origins, places, count, 4, "triton")
    gather_blocks(*call)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_blocks(*call)
    for seed, n in ((1, 40), (2, 7)):
        order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))[:40]
        origins.copy_(order)
        count.fill_(n)
        destination.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(destination[:n], source[order[:n]])
        assert not destination[n:].any()
