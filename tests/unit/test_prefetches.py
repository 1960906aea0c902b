"""What is on its way from home: whose slots are kept, what a step waits for, and how long frames stay in reserve."""

import numpy as np
import pytest
import torch

from engine.paged_kv import PAGE_SIZE, SequenceKV
from engine.prefetcher import MOST_OUTSTANDING, Prefetcher, Wanted
from engine.prefetches import PATIENCE, Prefetch, Prefetches
from engine.tiered_kv import RESERVED_SHARE, TieredKV
from kernels.residency import Transfers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sequences(count: int) -> list[SequenceKV]:
    return [SequenceKV(pages=[i]) for i in range(count)]


class Copying:
    """An event that has not come."""

    done = False

    def query(self) -> bool:
        return self.done


def state(*of: tuple[list[SequenceKV], int]) -> tuple[Prefetches, list[Copying]]:
    """Prefetches for these, of these rounds, all of them under way."""
    kept, copies = Prefetches(3, 1, 8, torch.device("cpu")), [Copying() for _ in of]
    nothing = torch.zeros(3, 0, dtype=torch.int32)
    transfers = Transfers(nothing, nothing, nothing[:, 0:0], nothing[:, 0:0])
    for (wanting, round), copied in zip(of, copies, strict=True):
        cold = torch.zeros(len(wanting), dtype=torch.int32)
        kept.add(Prefetch(wanting, round, kept.tickets + 1, transfers, cold, cold[:1], copied))  # type: ignore[arg-type]
    return kept, copies


def test_a_step_waits_for_what_was_prefetched_for_it() -> None:
    a, b, c = sequences(3)
    kept, _copies = state(([a], 3), ([b, c], 4))
    assert kept.due([a], shared=False) == 8
    assert kept.due([c], shared=False) == 16
    assert kept.due(sequences(1), shared=False) == 0
    assert kept.due([a], shared=True) == 16  # another's page may be its own
    b.pages.clear()
    assert kept.due([a], shared=False) == 16  # somebody else may have b's page now
    assert Prefetches(3, 1, 8, torch.device("cpu")).due([a], shared=True) == 0


def test_counts_go_round() -> None:
    (a,) = sequences(1)
    kept, _ = state(([a], 3))
    kept.tickets = kept.outstanding[0].ticket = 2**28
    assert kept.due([a], shared=False) == -(2**31)
    assert kept.due(sequences(1), shared=False) == 2**31 - 8


def test_what_was_prefetched_is_kept_until_it_is_read_or_nobody_reads_it() -> None:
    a, b = sequences(2)
    kept, copies = state(([a], 3), ([a, b], 4))
    assert (kept.oldest(9), kept.oldest(2)) == (3, 2)
    assert kept.note_step([a]) == []  # it may still be written
    copies[0].done = True
    (over,) = kept.note_step([])
    assert (over.round, kept.oldest(9), kept.are_copying) == (3, 4, True)
    copies[1].done = True
    for _ in range(PATIENCE - 3):
        assert kept.note_step([]) == []
    assert [prefetch.round for prefetch in kept.note_step([])] == [4]
    assert (kept.outstanding, kept.are_copying, kept.oldest(9)) == ([], False, 9)


def test_what_was_for_a_sequence_that_is_gone_is_not_kept() -> None:
    a, b = sequences(2)
    kept, copies = state(([a, b], 3))
    copies[0].done = True
    kept.forget(b)
    assert [prefetch.round for prefetch in kept.note_step([a])] == [3]


def spilled(frames: int) -> tuple[TieredKV, SequenceKV, SequenceKV]:
    """One session's KV is at home, another's in frames."""
    kv = TieredKV(1, 1, 2, frames, 3 * frames, 2 * frames * PAGE_SIZE, torch.float32, DEVICE)
    first, second = SequenceKV(), SequenceKV()
    for sequence, pages in ((first, frames - 2), (second, frames // 2)):
        kv.take_tables()
        kv.begin([(sequence, pages * PAGE_SIZE)])
        kv.give_tables()
        sequence.length = pages * PAGE_SIZE
    assert kv.spilled
    return kv, first, second


def test_new_pages_take_frames_in_reserve_while_prefetches_are_copied() -> None:
    """Where a copy goes is up to the clock, which has all other frames."""
    frames = 3 * RESERVED_SHARE
    kv, first, second = spilled(frames)
    assert len(kv._reserve) == 3
    reserved, copied = list(kv._reserve), Copying()
    slots = torch.tensor(reserved, device=kv.device)
    assert kv.tables.dirty[0, slots].all() and (kv.tables.page_in[0, slots] == -1).all()
    prefetcher = Prefetcher(kv, PAGE_SIZE, frames + 8, enforce_eager=True)
    words = torch.full((1, 3), -1, dtype=torch.int64).numpy().view("uint64")
    assert prefetcher.launch([Wanted(first, words)])
    (prefetch,) = kv.prefetches.outstanding
    assert not set(prefetch.transfers.slots[0, : int(prefetch.transfers.counts)].tolist()) & set(reserved)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    prefetch.copied = copied  # type: ignore[assignment]
    kv.take_tables()
    kv.begin([(second, 2 * PAGE_SIZE)])
    assert kv.frame_of[second.pages[-2:]].tolist() == reserved[:2]
    assert list(kv._reserve) == reserved[2:]
    second.length += 2 * PAGE_SIZE
    copied.done = True
    kv.begin([(second, PAGE_SIZE)])
    kv.give_tables()
    assert int(kv.frame_of[second.pages[-1]]) not in reserved
    assert len(kv._reserve) == 3
    kv.check_integrity()


def test_so_many_prefetches_are_outstanding_at_most() -> None:
    kv, first, _ = spilled(64)
    prefetcher = Prefetcher(kv, PAGE_SIZE, 70, enforce_eager=True)
    cold = (kv.tables.slot_of[0, first.pages] < 0).nonzero()[:, 0].tolist()
    for place in cold[: MOST_OUTSTANDING + 2]:
        words = np.array([[1 << place]], np.uint64)
        while not prefetcher.launch([Wanted(first, words)]):
            pass
    assert len(kv.prefetches.outstanding) == kv.counters.prefetches == MOST_OUTSTANDING
    assert kv.counters.skipped_prefetches == 2
    kv.take_tables()
    assert not prefetcher.is_ready  # somebody launches
    kv.tell_tables_free()
    kv.note_step([first])
    kv.give_tables()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    kv.take_accounts()
    assert prefetcher.is_ready
    assert kv.counters.prefetched_pages == kv.counters.wasted_pages == MOST_OUTSTANDING
    assert (first.prefetched, kv.prefetches.outstanding) == (MOST_OUTSTANDING * PAGE_SIZE, [])


@pytest.mark.skipif(DEVICE == "cpu", reason="events of graphs need a GPU")
def test_who_waits_for_an_event_in_a_graph_waits_for_its_last_launch() -> None:
    """By which prefetches follow a step that runs: it has been launched, the event has not come."""
    event, done, seen = torch.cuda.Event(external=True), torch.zeros(2, device=DEVICE), []
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(20_000_000)
        done[0] += 1
        event.record()
        torch.cuda._sleep(100_000_000)
        done[1] += 1
    for _ in range(3):
        torch.cuda.synchronize()
        done.zero_()
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(other):
            other.wait_event(event)
            seen.append(done.clone())
        other.synchronize()
    torch.cuda.synchronize()
    assert [part.tolist() for part in seen] == [[1, 0]] * 3
