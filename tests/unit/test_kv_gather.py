"""Copying scattered blocks: both backends against a loop over rows, and what they refuse."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import kv_gather
from kernels.kv_gather import gather_blocks, gather_layers, layer_copies, wait_for_layer

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
    ("host", "pairs"), [("source", 1), ("source", 2), ("destination", 2), ("neither", 1)]
)
@pytest.mark.parametrize(
    ("row_bytes", "dtype"),
    [
        (1024, torch.bfloat16),
        (4096, torch.uint8),
        (6144, torch.float32),  # not a power of two
        (4112, torch.uint8),  # 16 bytes beyond one: a piece that is mostly masked off
        (65536, torch.float16),
    ],
)
@pytest.mark.parametrize(("count", "programs"), [(0, 3), (1, 3), (13, 1), (13, 2), (16, 40)])
@backends
def test_rows_arrive_and_no_others(
    backend: str, count: int, programs: int, row_bytes: int, dtype: torch.dtype, host: str, pairs: int
) -> None:
    n, m, capacity = 23, 19, 16
    sources = [random_bytes(n, row_bytes, dtype, seed) for seed in range(pairs)]
    before = [random_bytes(m, row_bytes, dtype, seed + 2) for seed in range(pairs)]
    torch.manual_seed(count)
    origins, places = torch.randint(n, (capacity,)), torch.randperm(m)[:capacity]
    origins[torch.rand(capacity) < 0.3] = -1  # passed over
    wanted = [tensor.clone() for tensor in before]
    for source, tensor in zip(sources, wanted, strict=True):
        for origin, place in zip(origins[:count].tolist(), places[:count].tolist(), strict=True):
            if origin >= 0:
                tensor[place] = source[origin]
    destinations = tuple(on_host(t) if host == "destination" else t.to(DEVICE, copy=True) for t in before)
    gather_blocks(
        tuple(on_host(t) if host == "source" else t.to(DEVICE) for t in sources),
        destinations,
        ints(origins.tolist()),
        ints(places.tolist()),
        ints([count]),
        programs,
        backend,
    )
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert all(same_bytes(*both) for both in zip(destinations, wanted, strict=True))


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
    sources = [
        [random_bytes(n, 1024, torch.bfloat16, 2 * layer + i) for i in range(2)] for layer in range(layers)
    ]
    wanted = [
        [random_bytes(m, 1024, torch.bfloat16, 9 + 2 * layer + i) for i in range(2)]
        for layer in range(layers)
    ]
    destinations = [tuple(tensor.to(DEVICE, copy=True) for tensor in pair) for pair in wanted]
    for layer, pairs in enumerate(zip(sources, wanted, strict=True)):
        for source, tensor in zip(*pairs, strict=True):
            for origin, place in zip(origins[layer, : counts[layer]], places[layer], strict=False):
                if origin >= 0:
                    tensor[place] = source[origin]
    done = torch.zeros(layers, dtype=torch.int32, device=DEVICE)
    home = [tuple(on_host(tensor) for tensor in pair) for pair in sources]
    copies = layer_copies(home, destinations, torch.device(DEVICE))  # type: ignore[arg-type]
    lists = origins.int().to(DEVICE), places.int().to(DEVICE), ints(counts)
    # Where the count of earlier gathers has run over, and where it is what is due.
    earlier = ints([2**31 - 1, -(2**31), 5 - 2**31]), ints([2**31 - 1])
    gather_layers(copies, *lists, done, programs, backend, None, earlier)
    for layer in range(layers):
        wait_for_layer(done, layer, programs, backend)
    assert done.tolist() == [programs] * layers
    for got, pair in zip(destinations, wanted, strict=True):
        assert all(same_bytes(*both) for both in zip(got, pair, strict=True))
    with pytest.raises(ValueError, match="2 counts, 3 done; there is one of each for 3 layers"):
        gather_layers(copies, *lists[:2], lists[2][:2], done, programs, backend)


@pytest.mark.parametrize("seed", range(8))
@backends
def test_sources_in_segments_are_together_what_one_source_is(backend: str, seed: int) -> None:
    """Of one list each takes the rows that it holds, and says how many; some segments are empty."""
    rng = np.random.default_rng(seed)
    n, m, capacity, programs = (int(rng.integers(1, most)) for most in (60, 50, 40, 9))
    capacity = min(m, capacity)
    count, row_bytes = int(rng.integers(0, capacity + 1)), int(rng.choice([1024, 1536, 4112, 8192]))
    cuts = [0, *sorted(rng.integers(0, n + 1, int(rng.integers(0, 4))).tolist()), n]
    sources = [random_bytes(n, row_bytes, torch.uint8, 2 * seed + i) for i in range(2)]
    origins = rng.integers(-1, n, capacity)
    places = rng.permutation(m)[:capacity]
    lists = ints(origins.tolist()), ints(places.tolist()), ints([count])
    destinations = [tuple(torch.zeros(m, row_bytes, dtype=torch.uint8, device=DEVICE) for _ in "kv")]
    destinations.append(tuple(torch.zeros_like(part) for part in destinations[0]))
    gather_blocks(tuple(map(on_host, sources)), destinations[0], *lists, programs, "torch")
    counted = []
    for first, end in pairwise(cuts):
        held = tuple(on_host(source[first:end].clone()) for source in sources)
        copied = ints([7])
        gather_blocks(held, destinations[1], *lists, programs, backend, first, copied)
        counted.append(int(copied) - 7)
    wanted = [((origins[:count] >= first) & (origins[:count] < end)).sum() for first, end in pairwise(cuts)]
    assert counted == wanted
    for one, other in zip(*destinations, strict=True):
        assert same_bytes(one, other)


@backends
def test_layers_in_segments_share_their_counts(backend: str) -> None:
    """One list of each layer, two launches: each takes its own rows, and both count what they have finished."""
    layers, n, split, capacity, programs = 3, 23, 9, 16, 4
    torch.manual_seed(1)
    origins = torch.randint(-1, n, (layers, capacity)).int().to(DEVICE)
    places = torch.stack([torch.randperm(19)[:capacity] for _ in range(layers)]).int().to(DEVICE)
    counts, done = ints([13, 0, 16]), ints([0] * layers)
    sources = [
        tuple(random_bytes(n, 1024, torch.bfloat16, 2 * layer + i) for i in range(2))
        for layer in range(layers)
    ]
    wanted, got = (
        [tuple(torch.zeros(19, 512, dtype=torch.bfloat16, device=DEVICE) for _ in "kv") for _ in sources]
        for _ in range(2)
    )
    for layer, pair in enumerate(sources):
        rows = origins[layer], places[layer], counts[layer : layer + 1]
        gather_blocks(tuple(map(on_host, pair)), wanted[layer], *rows, programs)  # type: ignore[arg-type]
    copied = ints([0, 0])
    for i, part in enumerate((slice(0, split), slice(split, n))):
        home = [tuple(on_host(tensor[part].clone()) for tensor in pair) for pair in sources]
        copies = layer_copies(home, got, torch.device(DEVICE), part.start)  # type: ignore[arg-type]
        gather_layers(copies, origins, places, counts, done, programs, backend, copied[i : i + 1])
    for layer in range(layers):
        wait_for_layer(done, layer, 2 * programs, backend)
    assert done.tolist() == [2 * programs] * layers
    listed = torch.cat([origins[layer, : int(counts[layer])] for layer in range(layers)])
    listed = listed[listed >= 0]
    assert copied.tolist() == [int((listed < split).sum()), int((listed >= split).sum())]
    for one, other in zip(wanted, got, strict=True):
        assert all(same_bytes(*both) for both in zip(one, other, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one kernel after the other")
def test_a_layer_is_counted_when_earlier_gathers_have_come() -> None:
    source, got = random_bytes(4, 1024, torch.int16, 0), torch.zeros(4, 512, dtype=torch.int16, device=DEVICE)
    pair, target = (on_host(source), on_host(source)), (got, torch.zeros_like(got))
    copies = layer_copies([pair, pair], [target, target], torch.device(DEVICE))
    done, earlier, due = ints([0, 0]), ints([5, 4]), ints([5])
    rows = ints([[0, 1, 2, 3]] * 2)
    gathering, looking = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda._sleep(1)  # kernels are loaded when they run first, which would wait for those that run
    earlier += 0
    earlier.tolist()
    torch.cuda.synchronize()
    with torch.cuda.stream(gathering):
        gather_layers(copies, rows, rows, ints([4, 4]), done, 2, "triton", None, (earlier, due))
    with torch.cuda.stream(looking):
        torch.cuda._sleep(200_000_000)
        assert done.tolist() == [2, 1]
        earlier += 1
    torch.cuda.synchronize()
    assert done.tolist() == [2, 2]
    assert same_bytes(got, source)


@pytest.mark.parametrize("in_flight", [512, 4096])
def test_lists_longer_than_what_is_in_flight(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many iterations of each program."""
    monkeypatch.setattr(kv_gather, "IN_FLIGHT", in_flight)
    source = random_bytes(64, 1536, torch.int16, 0)
    destination = torch.zeros_like(source, device=DEVICE)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    rows = ints(list(range(64)))
    destinations = destination, torch.zeros_like(destination)
    sources = on_host(source), on_host(source.flip(0))
    gather_blocks(sources, destinations, ints(order.tolist()), rows, ints([61]), 3, "triton")
    for origin, copy in zip(sources, destinations, strict=True):
        assert same_bytes(copy[:61], origin[order[:61]])
        assert not copy[61:].any()


def arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments of gather_blocks, some of them replaced."""
    return {
        "sources": (on_host(torch.zeros(4, 64)),),
        "destinations": (torch.zeros(3, 64, device=DEVICE),),
        "source_rows": ints([3, 0]),
        "destination_rows": ints([1, 2]),
        "count": ints([2]),
        "programs": 2,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"destinations": (torch.zeros(3, 32, device=DEVICE),)}, "rows differ"),
        ({"destinations": (torch.zeros(64, device=DEVICE),)}, "rows differ"),
        (
            {"destinations": (torch.zeros(3, 64, dtype=torch.int32, device=DEVICE),)},
            "float32 into torch.int32",
        ),
        ({"destinations": (torch.zeros(3, 128, device=DEVICE)[:, ::2],)}, "contiguous"),
        ({"sources": (torch.zeros(64, 4).T,)}, "contiguous"),
        ({"sources": (torch.zeros(4, 64),) * 2}, "2 sources into 1"),
        ({"sources": (), "destinations": ()}, "0 sources into 0"),
        ({name: (torch.zeros(4, 64),) * 3 for name in ("sources", "destinations")}, "3 sources into 3"),
        (
            {
                "sources": (torch.zeros(4, 64), torch.zeros(5, 64)),
                "destinations": (torch.zeros(3, 64, device=DEVICE),) * 2,
            },
            r"pairs differ, \(5, 64\)",
        ),
        ({"source_rows": ints([3, 0]).long()}, "int32"),
        ({"count": ints([2]).long()}, "int32"),
        ({"count": ints([2, 2])}, "one count"),
        ({"source_rows": ints([3, 0, 1])}, "one list of each"),
        ({"programs": 0}, "programs"),
        ({"first_source": -1}, "first row is -1"),
        ({"copied": ints([0, 0])}, r"\[1\] int32 on .*, not in \(2,\)"),
        ({"copied": ints([0]).long()}, "not in .* torch.int64"),
    ],
)
@backends
def test_what_does_not_fit_is_refused(backend: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        gather_blocks(**arguments(**changes), backend=backend)


def test_the_kernel_needs_whole_words_and_pinned_memory() -> None:
    odd = {
        "sources": (torch.zeros(4, 6, device=DEVICE),),
        "destinations": (torch.zeros(3, 6, device=DEVICE),),
    }
    with pytest.raises(ValueError, match="16-byte words"):
        gather_blocks(**arguments(**odd), backend="triton")
    # Pageable memory; without a GPU, tensors of no memory stand for those on another device.
    device = DEVICE if DEVICE == "cuda" else "meta"
    elsewhere: dict[str, Any] = {
        name: value.to(device) for name, value in arguments().items() if isinstance(value, Tensor)
    }
    there, pageable = torch.zeros(4, 64, device=device), torch.zeros(4, 64)
    for sources, destinations in (((pageable,), (there,)), ((there,), (pageable,))):
        with pytest.raises(ValueError, match="pinned"):
            gather_blocks(sources, destinations, **elsewhere, programs=2, backend="triton")
    with pytest.raises(NotImplementedError):
        gather_blocks(**arguments(), backend="cuda")


@pytest.mark.parametrize("reaches", [True, False])
def test_memory_of_another_gpu_must_be_within_reach(monkeypatch: pytest.MonkeyPatch, reaches: bool) -> None:
    """Whatever GPUs there are."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reaches)
    own, other, third = (SimpleNamespace(device=torch.device("cuda", i)) for i in (0, 1, 0))
    if reaches:
        kv_gather._check_reach((own, other, third), own.device)  # type: ignore[arg-type]
        return
    kv_gather._check_reach((own, third), own.device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cuda:0 has no access to the memory of cuda:1"):
        kv_gather._check_reach((own, other), own.device)  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_any_list() -> None:
    source = on_host(random_bytes(50, 4096, torch.bfloat16, 0))
    destination = torch.zeros(40, 2048, dtype=torch.bfloat16, device=DEVICE)
    origins, places, count = ints([0] * 40), ints(list(range(40))), ints([1])
    call = ((source,), (destination,), origins, places, count, 4, "triton")
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
