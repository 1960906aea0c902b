"""Residency of KV pages: the clock by examples, its kernels against the reference, and both against plain contents."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import kernels.residency as residency
from kernels.residency import (
    ResidencyTables,
    drop_pages,
    empty_tables,
    find_slots,
    mark_home,
    place_new,
    request_pages,
)

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
both = pytest.mark.parametrize("backend", ["torch", "triton"])


def ints(values: Any, device: str = DEVICE) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ragged(lists: list[list[int]], device: str = DEVICE) -> tuple[Tensor, Tensor]:
    """[rows, width] with nonsense behind each list, and counts [rows]."""
    width = max(map(len, lists), default=0)
    padded = [[*pages, *[0] * (width - len(pages))] for pages in lists]
    return ints(padded, device).reshape(len(lists), width), ints([len(pages) for pages in lists], device)


# The clock by examples, one row each


@dataclass
class Row:
    """Tables of one row, by lists; what each call gives, as lists too."""

    tables: ResidencyTables
    backend: str

    def request(self, *lists: list[int], round: int, oldest: int) -> tuple[dict[int, int], list[int]]:
        """Where pages are copied to, in order, and which found no slot."""
        width = max(map(len, lists))
        padded = ints([[[*pages, *[0] * (width - len(pages))]] for pages in lists])
        counts = ints([[len(pages)] for pages in lists])
        done = request_pages(self.tables, padded, counts, ints([round]), ints([oldest]), self.backend)
        pages, slots = done.pages[0].tolist(), done.slots[0].tolist()
        placed, unplaced = int(done.counts), int(done.unplaced)
        return dict(zip(pages[:placed], slots, strict=False)), pages[placed : placed + unplaced]

    def place(self, *pages: int, round: int, oldest: int) -> tuple[list[int], int]:
        listed = ints([list(pages)]), ints([len(pages)])
        slots, unplaced = place_new(self.tables, *listed, ints([round]), ints([oldest]), self.backend)
        return slots[0].tolist(), int(unplaced)

    def save(self, *pages: int) -> None:
        mark_home(self.tables, ints([list(pages)]), ints([len(pages)]), self.backend)

    def drop(self, *pages: int) -> None:
        drop_pages(self.tables, ints([list(pages)]), ints([len(pages)]), self.backend)

    @property
    def hot(self) -> list[int]:
        return self.tables.page_in[0].tolist()

    @property
    def bits(self) -> list[int]:
        return self.tables.referenced[0].tolist()

    @property
    def hand(self) -> int:
        return int(self.tables.hand)


def one_row(slots: int, backend: str) -> Row:
    return Row(empty_tables(1, 20, slots, DEVICE), backend)


@both
def test_first_wanted_first_placed_and_each_once(backend: str) -> None:
    row = one_row(4, backend)
    assert row.request([7, 3, 7], [3, 9], round=0, oldest=0) == ({7: 0, 3: 1, 9: 2}, [])
    assert (row.hot, row.bits, row.hand) == ([7, 3, 9, -1], [0, 0, 0, 0], 3)
    assert row.request([9, 1], [5, 3, 1, 5, 6], round=1, oldest=1) == ({1: 3, 5: 0}, [6])
    assert (row.hot, row.bits, row.hand) == ([5, 3, 9, 1], [0, 1, 1, 0], 3)
    assert row.tables.stamps.tolist() == [[1, 1, 1, 1]]


@both
def test_a_bit_is_a_second_chance(backend: str) -> None:
    row = one_row(3, backend)
    row.request([0, 1, 2], round=0, oldest=0)
    row.request([0, 1], round=1, oldest=1)  # nothing is placed: the hand stays
    assert (row.bits, row.hand) == ([1, 1, 0], 0)
    assert row.request([5], round=2, oldest=2) == ({5: 2}, [])
    assert (row.bits, row.hand) == ([0, 0, 0], 0)
    row.request([1], round=3, oldest=3)
    assert row.request([6], round=4, oldest=4) == ({6: 0}, [])
    assert (row.bits, row.hand) == ([0, 1, 0], 1)  # not cleared behind the last victim


@both
def test_all_bits_set_takes_a_second_sweep(backend: str) -> None:
    row = one_row(3, backend)
    for round in (0, 1):
        row.request([0, 1, 2], round=round, oldest=round)
    assert row.bits == [1, 1, 1]
    assert row.request([4, 5, 6, 7], round=2, oldest=2) == ({4: 0, 5: 1, 6: 2}, [7])
    assert (row.hot, row.bits, row.hand) == ([4, 5, 6], [0, 0, 0], 0)


@both
def test_rounds_in_flight_and_dirty_pages_are_passed_over_untouched(backend: str) -> None:
    row = one_row(3, backend)
    assert row.place(8, round=0, oldest=0) == ([0], 0)
    for round in (1, 2):
        row.request([8, 0, 1], round=round, oldest=round)
    assert row.request([2, 3], round=3, oldest=2) == ({}, [2, 3])
    assert (row.hot, row.bits, row.hand) == ([8, 0, 1], [1, 1, 1], 0)
    assert row.request([2, 3, 4], round=3, oldest=3) == ({2: 1, 3: 2}, [4])
    assert (row.hot, row.bits) == ([8, 2, 3], [1, 0, 0])
    row.save(8, 9)
    assert row.request([4], round=4, oldest=4) == ({4: 1}, [])
    # A round counts as in flight itself, whatever `oldest` says.
    assert row.request([3, 4, 8, 5], round=5, oldest=9) == ({}, [5])


@both
def test_dropped_slots_are_free_when_their_round_has_ended(backend: str) -> None:
    row = one_row(2, backend)
    assert row.place(3, 4, 5, round=0, oldest=0) == ([0, 1, -1], 1)
    row.drop(4, 4, 5, -1, 20)
    assert row.hot == [3, -1]
    assert row.tables.dirty.tolist() == [[1, 0]]
    assert row.place(6, round=1, oldest=0) == ([-1], 1)
    assert row.place(6, 3, round=1, oldest=1) == ([1, 0], 0)  # the second is written again


@both
def test_pages_outside_of_the_table_and_counts_outside_of_lists(backend: str) -> None:
    row = one_row(4, backend)
    assert row.request([-1, 20, 5, 1 << 30, -(1 << 31), 6], round=0, oldest=0) == ({5: 0, 6: 1}, [])
    lists = ints([[[5, 20, 6, -1, 7]], [[6, 6, 8, 9, 9]], [[5, 6, 5, 6, 5]]])
    slots, late = find_slots(row.tables, lists, ints([[9], [3], [-2]]), backend)
    assert slots.tolist() == [[[0, -1, 1, -1, -1]], [[1, 1, -1, -1, -1]], [[-1] * 5]]
    assert late.tolist() == [[1], [1], [0]]
    done = request_pages(row.tables, lists, ints([[9], [-3], [0]]), ints([1]), ints([0]), backend)
    assert (done.counts.tolist(), done.pages[0, :1].tolist(), row.hot) == ([1], [7], [5, 6, 7, -1])


@both
def test_nothing_is_listed(backend: str) -> None:
    tables = empty_tables(2, 3, 1, DEVICE)
    zero = ints([0])
    for groups, width in ((0, 0), (0, 4), (2, 0)):
        lists, counts = ints([]).reshape(groups, 2, width), ints([[0, 0]] * groups).reshape(groups, 2)
        done = request_pages(tables, lists, counts, zero, zero, backend)
        assert (done.counts.tolist(), done.unplaced.tolist()) == ([0, 0], [0, 0])
        slots, late = find_slots(tables, lists, counts, backend)
        assert (slots.shape, late.tolist()) == ((groups, 2, width), [[0, 0]] * groups)
    none = ints([]).reshape(2, 0), ints([3, 0])
    assert place_new(tables, *none, zero, zero, backend)[1].tolist() == [0, 0]
    mark_home(tables, *none, backend)
    drop_pages(tables, *none, backend)
    assert all(torch.equal(a, b) for a, b in pairs(tables, empty_tables(2, 3, 1, DEVICE)))


# The kernels against the reference


def pairs(a: ResidencyTables, b: ResidencyTables) -> Iterable[tuple[Tensor, Tensor]]:
    return ((getattr(a, f.name).cpu(), getattr(b, f.name).cpu()) for f in fields(ResidencyTables))


def random_tables(
    rows: int, pages: int, slots: int, full: float, dirty: float, stamped: float, generator: torch.Generator
) -> ResidencyTables:
    """Shares of the slots that hold a page, and of these that are dirty or needed by round 8 or 9; else by 0 to 7."""

    def share(of: float) -> Tensor:
        return torch.rand(rows, slots, generator=generator) < of

    tables = empty_tables(rows, pages, slots)
    held = share(full)
    for row in range(rows):
        slot = held[row].nonzero()[:pages, 0]
        page = torch.randperm(pages, generator=generator)[: len(slot)]
        tables.slot_of[row, page] = slot.int()
        tables.page_in[row, slot] = page.int()
    held = tables.page_in >= 0
    tables.referenced.copy_(held & share(0.5))
    tables.dirty.copy_(held & share(dirty))
    old, young = (torch.randint(*ends, (rows, slots), generator=generator) for ends in ((-1, 8), (8, 10)))
    tables.stamps.copy_(torch.where(share(stamped), young, old))
    tables.hand.copy_(torch.randint(slots, (rows,), generator=generator))
    return tables


def random_lists(shape: tuple[int, ...], pages: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pages, some of them twice, a few outside of the table; counts from nothing to all."""
    lists = torch.randint(-1, pages + 1, shape, generator=generator)
    counts = torch.randint(-shape[-1] // 3, shape[-1] + 3, shape[:-1], generator=generator)
    return lists.int(), counts.int()


def ahead_of(row: Tensor, counts: Tensor) -> list[list[int]]:
    return [values[:n] for values, n in zip(row.tolist(), counts.tolist(), strict=True)]


def outcome(given: Any) -> list[Any]:
    """What a call gave, without what is undefined."""
    if given is None:
        return []
    if isinstance(given, tuple):
        return [tensor.tolist() for tensor in given]
    pages, slots, counts, unplaced = astuple(given)
    return [ahead_of(pages, counts + unplaced), ahead_of(slots, counts), counts.tolist(), unplaced.tolist()]


KINDS = {  # slots, full, dirty, stamped
    "as served": (40, 0.9, 0.1, 0.4),
    "room": (60, 0.2, 0.1, 0.1),
    "full": (25, 1.0, 0.0, 0.0),
    "all dirty": (25, 1.0, 1.0, 0.0),
    "all stamped": (25, 1.0, 0.0, 1.0),
    "one slot": (1, 1.0, 0.0, 0.3),
    "more slots than pages": (130, 1.0, 0.2, 0.2),
}


@pytest.mark.parametrize("chunks", [(2048, 1024), (16, 8)])
@pytest.mark.parametrize(("groups", "width"), [(1, 12), (5, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_equals_the_reference(
    kind: str, groups: int, width: int, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation, twice in a row, on the tables that the ones before left behind."""
    monkeypatch.setattr(residency, "_LISTED", chunks[0])
    monkeypatch.setattr(residency, "_SWEPT", chunks[1])
    rows, pages = 3, 90
    generator = torch.Generator().manual_seed(width + len(kind))
    wanted = random_tables(rows, pages, *KINDS[kind], generator)
    got = ResidencyTables(**{f.name: getattr(wanted, f.name).to(DEVICE, copy=True) for f in fields(wanted)})
    for round in (9, 10):
        rounds = ints([round], "cpu"), ints([round - 1], "cpu")
        shape = groups, rows, width
        calls: list[tuple[Any, tuple[Tensor, ...]]] = [
            (request_pages, (*random_lists(shape, pages, generator), *rounds)),
            (place_new, (*random_lists(shape[1:], pages, generator), *rounds)),
            (find_slots, random_lists(shape, pages, generator)),
            (mark_home, random_lists(shape[1:], pages, generator)),
            (drop_pages, random_lists(shape[1:], pages, generator)),
        ]
        for operation, arguments in calls:
            reference = operation(wanted, *arguments, "torch")
            done = operation(got, *(a.to(DEVICE) for a in arguments), "triton")
            assert outcome(done) == outcome(reference), operation.__name__
            for a, b in pairs(got, wanted):
                assert torch.equal(a, b), operation.__name__


@both
def test_lists_need_not_be_contiguous(backend: str) -> None:
    tables = empty_tables(2, 50, 16, DEVICE)
    lists = ints([[4, 5], [6, 7]]).T.expand(3, 2, 2)
    counts = ints([2, 1]).expand(3, 2)
    request_pages(tables, lists, counts, ints([0]), ints([0]), backend)
    slots, late = find_slots(tables, lists, counts, backend)
    assert slots.tolist() == [[[0, 1], [0, -1]]] * 3
    assert not late.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_any_round() -> None:
    at_full_size(rows=16, rounds=6, captured=True)


def test_full_size() -> None:
    """Many chunks of the sizes as they are."""
    at_full_size(rows=2, rounds=3, captured=False)


def at_full_size(rows: int, rounds: int, captured: bool) -> None:
    groups, width, pages, slots = 8, 640, 60_000, 10_000
    generator = torch.Generator().manual_seed(0)
    wanted = random_tables(rows, pages, slots, 0.9, 0.1, 0.4, generator)
    got = ResidencyTables(**{f.name: getattr(wanted, f.name).to(DEVICE, copy=True) for f in fields(wanted)})
    lists, counts = ints(0).expand(groups, rows, width).clone(), ints(0).expand(groups, rows).clone()
    inputs = lists, counts, ints([0]), ints([0])
    done = request_pages(got, *inputs, "triton")  # nothing; compiled before the capture
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            done = request_pages(got, *inputs, "triton")
    for round in range(9, 9 + rounds):
        drawn = random_lists((groups, rows, width), pages // 4, generator)
        arguments = *drawn, ints([round], "cpu"), ints([round - 1], "cpu")
        for tensor, value in zip(inputs, arguments, strict=True):
            tensor.copy_(value)
        if captured:
            graph.replay()
        else:
            done = request_pages(got, *inputs, "triton")
        assert outcome(done) == outcome(request_pages(wanted, *arguments))
        assert all(torch.equal(a, b) for a, b in pairs(got, wanted))


# What sessions do, against contents

ROWS, PAGES, SLOTS = 2, 14, 5
Key = tuple[int, int]  # row and page, or row and slot
shares = st.lists(st.integers(0, PAGES - 1), max_size=8)


@dataclass
class Session:
    pages: list[int] = field(default_factory=list)


class Offload(RuleBasedStateMachine):
    """Contents are numbers; those on the GPU change only by transfers and writes, those at home only by copies home
    and by late writes of what found no slot. Pages have the same numbers in all rows, but are there one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = empty_tables(ROWS, PAGES, SLOTS)
        self.sessions: list[Session] = []
        self.free = list(range(PAGES))
        self.written: dict[Key, int] = {}  # (row, page): what it must hold
        self.home: dict[Key, int] = {}
        self.unsaved: set[Key] = set()
        self.gpu: dict[Key, int] = {}  # (row, slot)
        self.needed: dict[
            Key, tuple[int, int]
        ] = {}  # (row, slot): the last round that needs it, and the page
        self.round, self.oldest = 0, 0
        self.numbers = count(1)

    @initialize(lengths=st.lists(st.integers(2, 5), min_size=1, max_size=2))
    def read_prompts(self, lengths: list[int]) -> None:
        """Sessions all of whose pages are at home."""
        for length in lengths:
            pages = [self.free.pop(0) for _ in range(length)]
            self.sessions.append(Session(pages))
            for key in [(row, page) for row in range(ROWS) for page in pages]:
                self.written[key] = self.home[key] = next(self.numbers)

    def where(self) -> dict[Key, int]:
        """(row, page) of all that is hot, and the slots."""
        table = self.tables.slot_of.tolist()
        return {(r, page): slot for r in range(ROWS) for page, slot in enumerate(table[r]) if slot >= 0}

    def rounds(self) -> tuple[Tensor, Tensor]:
        return ints([self.round], "cpu"), ints([self.oldest], "cpu")

    def keys(self, lists: list[list[int]]) -> set[Key]:
        return {(row, page) for row, pages in enumerate(lists) for page in pages}

    def in_flight(self, at: Key) -> bool:
        return at in self.needed and self.needed[at][0] >= self.oldest

    def check_placing(self, before: dict[Key, int], wanted: set[Key], unplaced: list[int]) -> None:
        """Who was evicted might be; who is wanted is hot, or counted, and then there was no slot left."""
        after = self.where()
        for (row, page), slot in before.items():
            if after.get((row, page)) != slot:
                assert (row, page) not in wanted
                assert (row, page) not in self.unsaved
                assert self.home[row, page] == self.written[row, page]
                assert not self.in_flight((row, slot))
        for key in after.keys() - before.keys():
            assert key in wanted
            assert not self.in_flight((key[0], after[key]))  # also of pages that were dropped
        dirty = {(row, before[row, page]) for row, page in self.unsaved if (row, page) in before}
        for row, missed in enumerate(unplaced):
            assert missed == len({key for key in wanted if key[0] == row} - after.keys())
            taken = {(row, slot) for (r, _), slot in after.items() if r == row and (r, _) in wanted}
            for slot in range(SLOTS):
                at = (row, slot)
                assert not missed or at in dirty or at in taken or self.in_flight(at)
        for row, page in wanted & after.keys():
            self.needed[row, after[row, page]] = (self.round, page)

    @precondition(lambda self: len(self.sessions) < 3)
    @rule()
    def open(self) -> None:
        self.sessions.append(Session())

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), new=st.integers(0, 4), again=st.integers(0, 2))
    def write(self, data: st.DataObject, new: int, again: int) -> None:
        """New pages behind a session's last ones, of which some are written again, all in some rows only."""
        session = data.draw(st.sampled_from(self.sessions))
        old = session.pages[len(session.pages) - min(again, len(session.pages)) :]
        fresh = [self.free.pop(0) for _ in range(min(new, len(self.free)))]
        session.pages += fresh
        lists = [fresh + (old if data.draw(st.booleans()) else []) for _ in range(ROWS)]
        before = self.where()
        slots, unplaced = place_new(self.tables, *ragged(lists, "cpu"), *self.rounds())
        self.check_placing(before, self.keys(lists), unplaced.tolist())
        for row, pages in enumerate(lists):
            for page, slot in zip(pages, slots[row].tolist(), strict=False):
                value = self.written[row, page] = next(self.numbers)
                if slot >= 0:
                    self.gpu[row, slot] = value
                    self.unsaved.add((row, page))
                else:
                    self.home[row, page] = value

    @precondition(lambda self: any(session.pages for session in self.sessions))
    @rule(
        data=st.data(),
        ahead=st.integers(0, 2),
        in_flight=st.integers(1, 3),
        draws=st.lists(st.tuples(shares, shares), min_size=1, max_size=3),
    )
    def request(
        self, data: st.DataObject, ahead: int, in_flight: int, draws: list[tuple[list[int], list[int]]]
    ) -> None:
        """Some sessions want some of their pages, in the round before or a new one; older rounds may have ended."""
        self.round += ahead
        self.oldest = max(self.oldest, self.round + 1 - in_flight)
        groups = []
        for drawn in draws:
            pages = data.draw(st.sampled_from([s.pages for s in self.sessions if s.pages]))
            groups.append([[pages[i % len(pages)] for i in part] for part in drawn])
        width = max(len(part) for group in groups for part in group)
        lists = ints([[part + [0] * (width - len(part)) for part in group] for group in groups], "cpu")
        counts = ints([[len(part) for part in group] for group in groups], "cpu")
        before = self.where()
        done = request_pages(self.tables, lists, counts, *self.rounds())
        lists_of_rows = [[page for group in groups for page in group[row]] for row in range(ROWS)]
        self.check_placing(before, self.keys(lists_of_rows), done.unplaced.tolist())
        after = self.where()
        transfers = [
            (row, page, slot)
            for row, n in enumerate(done.counts.tolist())
            for page, slot in zip(done.pages[row, :n].tolist(), done.slots[row, :n].tolist(), strict=True)
        ]
        assert len({(row, page) for row, page, _ in transfers}) == len(transfers)
        assert {(row, page) for row, page, _ in transfers} == after.keys() - before.keys()
        for row, page, slot in transfers:
            assert after[row, page] == slot
            assert self.home[row, page] == self.written[row, page]
            self.gpu[row, slot] = self.home[row, page]
        slots, late = find_slots(self.tables, lists, counts)
        for group, parts in enumerate(groups):
            for row, part in enumerate(parts):
                found = [after.get((row, page), -1) for page in part]
                assert slots[group, row].tolist() == found + [-1] * (width - len(part))
                assert late[group, row] == found.count(-1)

    @precondition(lambda self: self.unsaved)
    @rule(data=st.data(), all_of_them=st.booleans())
    def copy_home(self, data: st.DataObject, all_of_them: bool) -> None:
        keys = sorted(self.unsaved)
        if not all_of_them:
            keys = data.draw(st.lists(st.sampled_from(keys), min_size=1, unique=True))
        hot = self.where()
        for row, page in keys:
            self.home[row, page] = self.gpu[row, hot[row, page]]
        mark_home(
            self.tables, *ragged([[page for r, page in keys if r == row] for row in range(ROWS)], "cpu")
        )
        self.unsaved -= set(keys)

    @precondition(lambda self: any(session.pages for session in self.sessions))
    @rule(data=st.data(), n=st.integers(1, 3))
    def roll_back(self, data: st.DataObject, n: int) -> None:
        session = data.draw(st.sampled_from([s for s in self.sessions if s.pages]))
        self.forget(session.pages[-n:])
        del session.pages[-n:]

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.forget(session.pages)
        self.sessions = [s for s in self.sessions if s is not session]

    def forget(self, pages: list[int]) -> None:
        for (row, page), slot in self.where().items():
            if page in pages and (row, slot) in self.needed:
                self.needed[row, slot] = self.needed[row, slot][0], -1
        drop_pages(self.tables, *ragged([pages] * ROWS, "cpu"))
        self.free += pages
        for key in [(row, page) for row in range(ROWS) for page in pages]:
            self.written.pop(key, None)
            self.home.pop(key, None)
            self.unsaved.discard(key)

    @precondition(lambda self: self.oldest <= self.round)
    @rule(all_of_them=st.booleans())
    def end_round(self, all_of_them: bool) -> None:
        self.oldest = self.round + 1 if all_of_them else self.oldest + 1
        self.round = max(self.round, self.oldest)

    @invariant()
    def tables_are_inverse(self) -> None:
        hot = self.where()
        holds = self.tables.page_in.tolist()
        held = {(row, page): slot for row in range(ROWS) for slot, page in enumerate(holds[row]) if page >= 0}
        assert held == hot
        assert sum(page >= 0 for row in holds for page in row) == len(hot)
        assert self.tables.slot_of.min() >= -1
        assert ((self.tables.hand >= 0) & (self.tables.hand < SLOTS)).all()

    @invariant()
    def every_page_is_where_it_is_found(self) -> None:
        hot = self.where()
        assert hot.keys() <= self.written.keys()
        for key, value in self.written.items():
            found = self.gpu[key[0], hot[key]] if key in hot else self.home[key]
            assert found == value

    @invariant()
    def nothing_dirty_is_lost(self) -> None:
        hot = self.where()
        assert self.unsaved <= hot.keys()
        marked = {(row, slot) for row, slot in self.tables.dirty.nonzero().tolist()}
        assert marked == {(row, hot[row, page]) for row, page in self.unsaved}

    @invariant()
    def rounds_in_flight_keep_their_pages(self) -> None:
        hot = self.where()
        for (row, slot), (_, page) in self.needed.items():
            if self.in_flight((row, slot)):
                assert (
                    hot.get((row, page), slot) == slot or page not in self.tables.page_in[row, slot].tolist()
                )
                assert self.tables.page_in[row, slot] in (page, -1)


TestOffload = Offload.TestCase
TestOffload.settings = settings(max_examples=150, stateful_step_count=40)


# What does not fit


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"slot_of": torch.zeros(4, dtype=torch.int32)}, r"slot_of \(4,\)"),
        ({"page_in": torch.zeros(2, 0, dtype=torch.int32)}, r"page_in \(2, 0\)"),
        ({"slot_of": torch.zeros(3, 9, dtype=torch.int32)}, r"slot_of is \(3, 9\) .*, not \(2, 9\)"),
        ({"stamps": torch.zeros(2, 5, dtype=torch.int64)}, r"stamps is .*int64 .*, not \(2, 5\) torch.int32"),
        ({"dirty": torch.zeros(2, 5, dtype=torch.bool)}, r"dirty is .*bool .*, not .*uint8"),
        ({"hand": torch.zeros(2, 1, dtype=torch.int32)}, r"hand is \(2, 1\) .*, not \(2,\)"),
        ({"hand": torch.zeros(2, dtype=torch.int32, device="meta")}, "on meta, not .* on cpu"),
        ({"referenced": torch.zeros(5, 2, dtype=torch.uint8).T}, "referenced must be contiguous"),
    ],
)
def test_tables_that_do_not_fit(changes: dict[str, Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(empty_tables(2, 9, 5), **changes)


@both
def test_arguments_that_do_not_fit(backend: str) -> None:
    tables, one = empty_tables(2, 9, 5, DEVICE), ints([1])
    lists, counts = ints([[[1], [2]]]), ints([[1, 1]])
    pages, ends = lists[0], counts[0]
    for operation, name, rest in (
        (request_pages, "request_pages", (one, one)),
        (find_slots, "find_slots", ()),
    ):
        for given, match in (
            ((pages, counts), r"lists are \[groups, rows, width\], not \(2, 1\)"),
            ((lists[:, :1], counts), r"lists is \(1, 1, 1\) .*, not \(1, 2, 1\)"),
            ((lists.long(), counts), "lists is .*int64 .*, not .*int32"),
            ((lists, ends), r"counts is \(2,\) .*, not \(1, 2\)"),
        ):
            with pytest.raises(ValueError, match=f"^{name}: {match}"):
                operation(tables, *given, *rest, backend)
    for operation, name, rest in (
        (place_new, "place_new", (one, one)),
        (mark_home, "mark_home", ()),
        (drop_pages, "drop_pages", ()),
    ):
        for given, match in (
            ((lists, ends), r"pages are \[rows, width\], not \(1, 2, 1\)"),
            ((pages[:1], ends), r"pages is \(1, 1\) .*, not \(2, 1\)"),
            ((pages, ends.long()), "counts is .*int64 .*, not .*int32"),
            ((pages, counts), r"counts is \(1, 2\) .*, not \(2,\)"),
        ):
            with pytest.raises(ValueError, match=f"^{name}: {match}"):
                operation(tables, *given, *rest, backend)
    with pytest.raises(ValueError, match=r"round is \(\) .*, not \(1,\)"):
        request_pages(tables, lists, counts, ints(1), one, backend)
    with pytest.raises(ValueError, match=r"oldest is .*int64"):
        place_new(tables, pages, ends, one, one.long(), backend)
    with pytest.raises(NotImplementedError, match="'cuda' is not built"):
        find_slots(tables, lists, counts, "cuda")
