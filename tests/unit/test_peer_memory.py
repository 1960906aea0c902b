"""Memory of a neighbour GPU: which one it is, what is said where there is none, and on two GPUs the real thing."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.peer_memory as peer_memory
from engine.paged_kv import PAGE_SIZE, SequenceKV
from engine.peer_memory import NEXT, neighbour_index, open_neighbour, peer_pages
from engine.tier_reads import StagedReads, StepRounds, fetch_listed
from engine.tiered_kv import TieredKV, head_rows

LAYERS, HEADS, DIM, FRAMES, PAGES, LONGEST = 3, 2, 64, 80, 300, 100


@pytest.mark.parametrize(
    ("own", "count", "index", "chosen"), [(0, 2, NEXT, 1), (1, 2, NEXT, 0), (2, 4, NEXT, 3), (2, 4, 0, 0)]
)
def test_which_gpu_it_is(own: int, count: int, index: int, chosen: int) -> None:
    assert neighbour_index(own, count, index) == chosen


def test_a_neighbour_is_another_gpu_that_the_process_sees() -> None:
    for index in (1, 3, 7):
        with pytest.raises(ValueError, match=rf"--peer-gpu {index}: the model is on GPU 1 of the 3 .* 0 … 2"):
            neighbour_index(1, 3, index)
    for count in (0, 1):
        with pytest.raises(ValueError, match=rf"sees {count}: let it see two \(CUDA_VISIBLE_DEVICES\)"):
            neighbour_index(0, count)


def test_gpus_that_cannot_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"model {index}")
    with pytest.raises(
        ValueError, match=r"cuda:2 \(model 2\) cannot reach the memory of cuda:0 \(model 0\): choose another"
    ):
        open_neighbour(torch.device("cuda", 2))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ValueError, match=r"expandable_segments:True .* is not built: .* unset one"):
        open_neighbour(torch.device("cuda", 2))


def test_a_neighbour_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peer_memory, "open_neighbour", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 29, 8 << 30))
    with pytest.raises(
        MemoryError, match=r"cuda:1 has no 2.0 GiB for KV, 1.5 GiB of it are free: lower --peer"
    ):
        peer_pages(2, 1024, 8, 1024, torch.float32, torch.device("cuda", 0))


def read(kv: TieredKV) -> tuple[list[Tensor], list[int]]:
    """Random KV of two sequences that does not fit into the frames: lists of it as fetched, and all of it as staged.

    And of each fetch, how many pages the neighbour had.
    """
    generator, sequences = torch.Generator(kv.device).manual_seed(0), [SequenceKV(), SequenceKV()]
    for start in range(0, 1280, 64):
        kv.begin([(sequence, 64) for sequence in sequences])
        for sequence in sequences:
            frames = torch.from_numpy(kv.frames(sequence)[start // PAGE_SIZE :]).long().to(kv.device)
            for pages in (*kv.k_pages, *kv.v_pages):
                size = len(frames), *pages.shape[1:]
                pages[frames] = torch.randn(size, generator=generator, device=kv.device)
            sequence.length += 64
    kv.begin([(sequence, 1) for sequence in sequences])
    tables = torch.from_numpy(np.stack([sequence.table() for sequence in sequences])).to(kv.device)
    found, from_peer = [], []
    for turn in range(6):  # each lists other pages, so that all come and go
        lists = torch.arange(turn * 13, turn * 13 + 8, dtype=torch.int32, device=kv.device)
        lists = lists.expand(LAYERS, 2, HEADS, 8).contiguous()
        counts = torch.full((LAYERS, 2, HEADS), 8, dtype=torch.int32, device=kv.device)
        numbers = kv.step_round(), kv.prefetches.oldest(kv.round), 0
        tensors = (torch.tensor([n], dtype=torch.int32, device=kv.device) for n in numbers)
        fetched = fetch_listed(kv, lists, counts, PAGE_SIZE, tables, StepRounds(*tensors, None, None))
        for layer in range(LAYERS):
            fetched.wait(layer)
            slots = fetched.slots[layer].flatten().long()
            found += [head_rows(pages[layer])[slots] for pages in (kv.k_pages, kv.v_pages)]
        assert int(fetched.refused) == 0
        from_peer.append(0 if fetched.from_peer is None else int(fetched.from_peer))
    for sequence in sequences:
        staged = StagedReads(kv, [sequence])
        for layer in range(LAYERS):
            found += [part[: len(sequence.pages) - 1].clone() for part in staged.layer(layer)]
    kv.check_integrity()
    return [part.cpu() for part in found], from_peer


@pytest.mark.gpu
def test_what_a_neighbour_gpu_keeps_is_what_the_host_would() -> None:
    """On two GPUs; on a CPU its own memory stands for the neighbour's."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs, or none")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = LAYERS, HEADS, DIM, FRAMES, PAGES, LONGEST * PAGE_SIZE, torch.float32, device
    without, nothing = read(TieredKV(*sizes))
    peer = peer_pages(LAYERS, 100, HEADS, DIM, torch.float32, device)
    assert device.type == "cpu" or peer[0][0].device == torch.device("cuda", 1)
    found, from_peer = read(TieredKV(*sizes, peer=peer))
    for one, other in zip(without, found, strict=True):
        assert torch.equal(one, other)
    assert not any(nothing) and max(from_peer) > 0 and min(from_peer) == 0  # of early and of late pages
    assert all(bool(part.any()) for part in (*peer[0], *peer[1]))
