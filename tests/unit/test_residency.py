"""Residency of KV pages: the clock by examples, and its kernels against the reference.

`test_tiered_kv` checks the reference against the contents of pages, through any sequence of what sessions do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specahead.kernels.residency import (
    ListedBlocks,
    ResidencyTables,
    Transfers,
    count_missing_blocks,
    drop_pages,
    empty_tables,
    find_block_lines,
    mark_stored,
    pin_gpu_pages,
    request_blocks,
)
from specahead.kernels.residency import sizes as chunk_sizes

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
both = pytest.mark.parametrize("backend", ["torch", "triton"])


def found_lines(tables: ResidencyTables, listed: ListedBlocks, backend: str = "torch") -> Tensor:
    """find_block_lines, with -1 beyond the counts."""
    lines = find_block_lines(tables, listed, backend, absent=-1)
    place = torch.arange(lines.shape[3], device=lines.device)
    return lines.masked_fill(place >= listed.counts[..., None] * listed.pages_per_block, -1)


def to_device(value: Any) -> Any:
    """Return an argument of an operation with its tensors on the device."""
    if isinstance(value, ListedBlocks):
        return ListedBlocks(*(to_device(each) for each in vars(value).values()))
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def ints(values: Any, device: str = DEVICE) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# The clock by examples: one row and one head, blocks of one page, which is that of their number


@dataclass
class Row:
    """Tables of one row, by lists; what each call gives, as lists too."""

    tables: ResidencyTables
    backend: str

    def request(self, *lists: list[int], round: int) -> tuple[dict[int, int], list[int]]:
        """Where pages are copied to, in order, and which found no line."""
        width = max(map(len, lists))
        padded = ints([[[[*pages, *[0] * (width - len(pages))]] for pages in lists]])
        counts = ints([[[len(pages)] for pages in lists]])
        numbers = ints([list(range(20))] * len(lists))
        done = request_blocks(self.tables, ListedBlocks(padded, counts, numbers, 1, 1), ints([round]), self.backend)
        pages, lines = done.pages[0].tolist(), done.lines[0].tolist()
        placed, overflow = int(done.counts), int(done.overflow)
        return dict(zip(pages[:placed], lines, strict=False)), pages[placed : placed + overflow]

    def pin(self, pages: dict[int, int], round: int) -> None:
        gpu_pages = ints(list(pages.values()))
        pin_gpu_pages(self.tables, ints(list(pages)), gpu_pages, ints([round]), 1, self.backend)

    def save(self, *pages: int) -> None:
        mark_stored(self.tables, ints(list(pages)), 1, self.backend)

    def drop(self, *pages: int) -> None:
        drop_pages(self.tables, ints(list(pages)), 1, self.backend)

    @property
    def cached(self) -> list[int]:
        return self.tables.page_in[0].tolist()

    @property
    def bits(self) -> list[int]:
        return self.tables.referenced[0].tolist()

    @property
    def hand(self) -> int:
        return int(self.tables.hand)


def one_row(lines: int, backend: str) -> Row:
    return Row(empty_tables(1, 20, lines, DEVICE), backend)


@both
def test_first_wanted_first_placed_and_each_once(backend: str) -> None:
    row = one_row(4, backend)
    assert row.request([7, 3, 7], [3, 9], round=0) == ({7: 0, 3: 1, 9: 2}, [])
    assert (row.cached, row.bits, row.hand) == ([7, 3, 9, -1], [0, 0, 0, 0], 3)
    assert row.request([9, 1], [5, 3, 1, 5, 6], round=1) == ({1: 3, 5: 0}, [6])
    assert (row.cached, row.bits, row.hand) == ([5, 3, 9, 1], [0, 1, 1, 0], 3)
    assert row.tables.stamps.tolist() == [[1, 1, 1, 1]]


@both
def test_a_bit_is_a_second_chance(backend: str) -> None:
    row = one_row(3, backend)
    row.request([0, 1, 2], round=0)
    row.request([0, 1], round=1)  # nothing is placed: the hand stays
    assert (row.bits, row.hand) == ([1, 1, 0], 0)
    assert row.request([5], round=2) == ({5: 2}, [])
    assert (row.bits, row.hand) == ([0, 0, 0], 0)
    row.request([1], round=3)
    assert row.request([6], round=4) == ({6: 0}, [])
    assert (row.bits, row.hand) == ([0, 1, 0], 1)  # not cleared behind the last victim


@both
def test_rounds_in_flight_and_dirty_pages_are_passed_over_untouched(backend: str) -> None:
    row = one_row(3, backend)
    row.pin({8: 0}, round=0)
    for round in (1, 2):
        row.request([8, 0, 1], round=round)
    assert row.request([2, 3], round=2) == ({}, [2, 3])
    assert (row.cached, row.bits, row.hand) == ([8, 0, 1], [1, 1, 1], 0)
    assert row.request([2, 3, 4], round=3) == ({2: 1, 3: 2}, [4])
    assert (row.cached, row.bits) == ([8, 2, 3], [1, 0, 0])
    row.save(8, 9)
    assert row.request([4], round=4) == ({4: 1}, [])
    # What the round itself needs is no victim.
    assert row.request([3, 4, 8, 5], round=5) == ({}, [5])


@both
def test_dropped_slots_are_free_when_their_round_has_ended(backend: str) -> None:
    row = one_row(2, backend)
    row.pin({3: 0, 4: 1}, round=0)
    row.drop(4, 4, 5, -1, 20)
    assert row.cached == [3, -1]
    assert row.tables.dirty.tolist() == [[1, 0]]
    assert row.request([6], round=0) == ({}, [6])
    assert row.request([6], round=1) == ({6: 1}, [])


@both
def test_blocks_of_several_pages_and_heads(backend: str) -> None:
    """Sequences of 5 and of 3 pages in a table of 10, two heads, blocks of 2 pages."""
    tables, now = empty_tables(2, 20, 9, DEVICE), ints([0])
    page_tables = ints([[4, 3, 8, 7, 5], [4, 2, 6, -1, 10]])
    lists = ints([[[[2, 0], [0, 9]], [[0, 1], [2, -1]]], [[[1, 1], [0, 0]], [[2, 3], [1, 0]]]])
    counts = ints([[[2, 1], [2, 2]], [[1, 0], [2, 2]]])
    done = request_blocks(tables, ListedBlocks(lists, counts, page_tables, 2, 2), now, backend)
    wanted = [[10, 8, 6, 9, 7, 4, 12], [16, 14, 13, 9, 5]]
    assert ahead_of(done.pages, done.counts) == wanted
    assert ahead_of(done.lines, done.counts) == [list(range(7)), list(range(5))]
    lines = found_lines(tables, ListedBlocks(lists, counts, page_tables, 2, 2), backend)
    assert lines[0].tolist() == [[[0, -1, 1, 2], [3, 4, -1, -1]], [[1, 5, 6, -1], [-1] * 4]]
    assert lines[1].tolist() == [[[0, 1, -1, -1], [-1] * 4], [[-1] * 4, [2, -1, 3, 4]]]
    assert count_missing_blocks(tables, ListedBlocks(lists, counts, page_tables, 2, 2), backend).tolist() == [0, 0]
    pin_gpu_pages(tables, ints([4, 9]), ints([3, 0]), ints([1]), 2, backend)
    assert tables.page_in.tolist() == [[18, 19, 6, -1, 7, 4, 8, 9, -1], [18, 19, 13, -1, 5, -1, 8, 9, -1]]
    mark_stored(tables, ints([9, 8, -1]), 2, backend)
    assert tables.dirty.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0]] * 2
    drop_pages(tables, ints([3, 4]), 2, backend)
    assert tables.page_in.tolist() == [[18, 19, -1, -1, -1, 4, -1, -1, -1], [18, 19, 13, -1, 5] + [-1] * 4]
    assert not tables.dirty.any()
    assert count_missing_blocks(tables, ListedBlocks(lists, counts, page_tables, 2, 2), backend).tolist() == [4, 3]


@both
def test_nothing_is_listed(backend: str) -> None:
    tables = empty_tables(2, 6, 1, DEVICE)
    zero = ints([0])
    for sequences, width, length in ((0, 0, 3), (0, 4, 3), (2, 0, 3), (1, 3, 0)):
        lists, counts = ints(0).expand(2, sequences, 3, width), ints(1).expand(2, sequences, 3)
        page_tables = ints(0).expand(sequences, length)
        done = request_blocks(tables, ListedBlocks(lists, counts, page_tables, 3, 2), zero, backend)
        assert (done.counts.tolist(), done.overflow.tolist()) == ([0, 0], [0, 0])
        lines = found_lines(tables, ListedBlocks(lists, counts, page_tables, 3, 2), backend)
        missing = count_missing_blocks(tables, ListedBlocks(lists, counts, page_tables, 3, 2), backend)
        assert (lines.shape, missing.tolist()) == ((2, sequences, 3, 2 * width), [0] * sequences)
        assert (lines == -1).all()
    pin_gpu_pages(tables, ints([]), ints([]), zero, 3, backend)
    mark_stored(tables, ints([]), 3, backend)
    drop_pages(tables, ints([]), 3, backend)
    assert all(torch.equal(a, b) for a, b in pairs(tables, empty_tables(2, 6, 1, DEVICE)))


@both
def test_rows_that_request_one_by_one_get_the_same(backend: str) -> None:
    """Layers that choose their blocks request them one by one. `together` has the same requests in one launch."""
    random = torch.Generator().manual_seed(1)
    together, apart = empty_tables(3, 30, 13, DEVICE), empty_tables(3, 30, 13, DEVICE)
    page_tables = torch.arange(15, dtype=torch.int32).to(DEVICE).view(3, 5)[:2]
    for turn in range(3):
        lists = torch.stack([torch.randperm(5, generator=random)[:3] for _ in range(12)]).int().to(DEVICE)
        listed = lists.view(3, 2, 2, 3), ints([[[3, 1], [2, 3]]] * 3)
        done = request_blocks(together, ListedBlocks(*listed, page_tables, 2, 1), ints([turn]), backend)
        for row in range(3):
            of_row = (each[row : row + 1] for each in listed)
            alone = request_blocks(apart.of_row(row), ListedBlocks(*of_row, page_tables, 2, 1), ints([turn]), backend)
            count = int(alone.counts)
            assert (count, int(alone.overflow)) == (int(done.counts[row]), int(done.overflow[row]))
            assert torch.equal(alone.pages[0, :count], done.pages[row, :count])
    assert all(torch.equal(a, b) for a, b in pairs(together, apart))
    assert int(together.hand.max()) > 0


# The kernels against the reference


def pairs(a: ResidencyTables, b: ResidencyTables) -> Iterable[tuple[Tensor, Tensor]]:
    return ((getattr(a, name).cpu(), getattr(b, name).cpu()) for name in ResidencyTables._fields)


def random_tables(
    rows: int, pages: int, lines: int, full: float, dirty: float, stamped: float, generator: torch.Generator
) -> ResidencyTables:
    """Shares of the lines that hold a page, and of these that are dirty or needed by round 8 or 9; else by 0 to 7."""

    def share(of: float) -> Tensor:
        return torch.rand(rows, lines, generator=generator) < of

    tables = empty_tables(rows, pages, lines)
    held = share(full)
    for row in range(rows):
        line = held[row].nonzero()[:pages, 0]
        page = torch.randperm(pages, generator=generator)[: len(line)]
        tables.line_of[row, page] = line.int()
        tables.page_in[row, line] = page.int()
    held = tables.page_in >= 0
    tables.referenced.copy_(held & share(0.5))
    tables.dirty.copy_(held & share(dirty))
    old, young = (torch.randint(*ends, (rows, lines), generator=generator) for ends in ((-1, 8), (8, 10)))
    tables.stamps.copy_(torch.where(share(stamped), young, old))
    tables.hand.copy_(torch.randint(lines, (rows,), generator=generator))
    return tables


def random_blocks(
    shape: tuple[int, ...], pages: int, per_block: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, some of them twice, a few outside of a table; counts from nothing to all; tables that share pages."""
    length = 2 * shape[-1] * per_block // 3 + 1
    lists = torch.randint(-1, length // per_block + 2, shape, generator=generator)
    counts = torch.randint(-shape[-1] // 3, shape[-1] + 3, shape[:-1], generator=generator)
    page_tables = torch.randint(-1, pages + 1, (shape[1], length), generator=generator)
    return lists.int(), counts.int(), page_tables.int()


def random_pages(n: int, pages: int, generator: torch.Generator) -> Tensor:
    """Each once, but for a few outside of the table."""
    chosen = torch.randperm(pages, generator=generator)[:n].int()
    chosen[torch.rand(len(chosen), generator=generator) < 0.2] = -1
    return torch.cat([chosen, ints([pages] * (n - len(chosen)), "cpu")])


def ahead_of(row: Tensor, counts: Tensor) -> list[list[int]]:
    return [values[:n] for values, n in zip(row.tolist(), counts.tolist(), strict=True)]


def outcome(given: Any) -> list[Any]:
    """What a call gave, without what is undefined."""
    if given is None:
        return []
    if isinstance(given, Tensor):
        return given.tolist()
    pages, lines, counts, overflow = given
    return [ahead_of(pages, counts + overflow), ahead_of(lines, counts), counts.tolist(), overflow.tolist()]


KINDS = {  # lines, full, dirty, stamped
    "as served": (40, 0.9, 0.1, 0.4),
    "room": (60, 0.2, 0.1, 0.1),
    "full": (25, 1.0, 0.0, 0.0),
    "all dirty": (25, 1.0, 1.0, 0.0),
    "all stamped": (25, 1.0, 0.0, 1.0),
    "one line": (1, 1.0, 0.0, 0.3),
    "more lines than pages": (130, 1.0, 0.2, 0.2),
}


SMALL = {"LISTED": 32, "PARTS": 3, "FOUND": 32, "JOINED": 2, "CLAIMS": 4, "SWEPT": 32, "SWEEPERS": 2}


BLOCKS_OF_PAGES = 5, 2, 12, 3  # sequences, KV heads, blocks of a list, pages of a block
ONE_HEAD, MANY_BLOCKS = (1, 1, 30, 1), (3, 2, 40, 1)


@pytest.mark.parametrize(
    ("kind", "listed", "small"),
    [
        *((kind, BLOCKS_OF_PAGES, True) for kind in KINDS),
        *((kind, listed, True) for kind in ("as served", "full") for listed in (ONE_HEAD, MANY_BLOCKS)),
        *((kind, BLOCKS_OF_PAGES, False) for kind in ("as served", "full")),
    ],
)
def test_triton_equals_the_reference(
    kind: str, listed: tuple[int, int, int, int], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation, twice in a row, on the tables that the ones before left behind."""
    sequences, kv_heads, width, per_block = listed
    if small:
        for name, value in SMALL.items():
            monkeypatch.setattr(chunk_sizes, name, value)
    rows, pages = 2, 88 // kv_heads
    generator = torch.Generator().manual_seed(width + len(kind))
    wanted = random_tables(rows, pages * kv_heads, *KINDS[kind], generator)
    got = ResidencyTables(*(tensor.to(DEVICE, copy=True) for tensor in wanted))
    shape, sizes = (rows, sequences, kv_heads, width), (kv_heads, per_block)
    for round in (9, 10):
        now = ints([round], "cpu")
        n = 7 if round == 9 else 2
        gpu_pages = random_pages(n, wanted.lines // kv_heads, generator)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (request_blocks, (ListedBlocks(*random_blocks(shape, pages, per_block, generator), *sizes), now)),
            (pin_gpu_pages, (random_pages(n, pages, generator), gpu_pages, now, kv_heads)),
            (found_lines, (blocks := ListedBlocks(*random_blocks(shape, pages, per_block, generator), *sizes),)),
            (count_missing_blocks, (blocks,)),
            (mark_stored, (random_pages(n, pages, generator), kv_heads)),
            (drop_pages, (random_pages(n, pages, generator), kv_heads)),
        ]
        for operation, arguments in calls:
            reference = operation(wanted, *arguments, "torch")
            done = operation(got, *map(to_device, arguments), "triton")
            assert outcome(done) == outcome(reference), operation.__name__
            for a, b in pairs(got, wanted):
                assert torch.equal(a, b), operation.__name__


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_any_round() -> None:
    at_full_size(rows=4, rounds=6, captured=True)


def test_full_size() -> None:
    """Many chunks of the sizes as they are."""
    at_full_size(rows=2, rounds=2, captured=False)


def at_full_size(rows: int, rounds: int, captured: bool) -> None:
    sequences, kv_heads, width, pages, lines = 3, 4, 1300, 12_000, 10_000
    generator = torch.Generator().manual_seed(0)
    wanted = random_tables(rows, pages * kv_heads, lines, 0.9, 0.1, 0.4, generator)
    got = ResidencyTables(*(tensor.to(DEVICE, copy=True) for tensor in wanted))
    shape = rows, sequences, kv_heads, width
    lists, counts, page_tables = (t.to(DEVICE) for t in random_blocks(shape, pages, 1, generator))
    inputs = lists, counts.zero_(), page_tables, ints([0])

    def request() -> Transfers:
        return request_blocks(got, ListedBlocks(*inputs[:3], kv_heads, 1), *inputs[3:], "triton")

    done = request()  # nothing; compiled before the capture
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            done = request()
    for round in range(9, 9 + rounds):
        drawn = random_blocks(shape, pages // 3, 1, generator)
        now = ints([round], "cpu")
        for tensor, value in zip(inputs, (*drawn, now), strict=True):
            tensor.copy_(value)
        if captured:
            graph.replay()
        else:
            done = request()
        assert outcome(done) == outcome(request_blocks(wanted, ListedBlocks(*drawn, kv_heads, 1), now))
        assert all(torch.equal(a, b) for a, b in pairs(got, wanted))
