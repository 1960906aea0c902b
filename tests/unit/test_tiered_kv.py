"""KV in tiers against a model that keeps everything, through any sequence of what sessions do to it."""

import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from specahead.engine.kv.fetch import LastChoices
from specahead.engine.kv.pages import PAGE_SIZE, OutOfPages, SequenceKV, pages_for
from specahead.engine.kv.staged import StagedReads
from specahead.engine.kv.tier_memory import head_rows
from specahead.engine.kv.tiered import TieredKV
from specahead.kernels.paged_attention import BlockLists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, HEADS, DIM = 2, 2, 2
PAGES, LONGEST, GAMMA, GROUP = 20, 9 * PAGE_SIZE, 20, 2 * PAGE_SIZE
# Prompts begin with these, so that many share pages.
BLOCKS = [[kind] * PAGE_SIZE for kind in (1, 2, 3)]


@lru_cache(512)
def contents(tokens: tuple[int, ...]) -> Tensor:
    """[layers, 2 (keys, values), tokens, heads, dim], of each token what follows from all up to it, as in a model."""
    chain = list(accumulate(tokens, lambda crc, token: zlib.crc32(bytes([token]), crc), initial=0))[1:]
    values = torch.tensor([crc % 65536 for crc in chain], dtype=torch.float32)
    part = torch.arange(LAYERS * 2 * HEADS * DIM, dtype=torch.float32).view(LAYERS, 2, 1, HEADS, DIM)
    return values.view(-1, 1, 1) * part.numel() + part


def in_pages(content: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """[layers, 2, pages, heads, PAGE_SIZE, dim], and which tokens of it there are: [pages, PAGE_SIZE]."""
    missing = pages * PAGE_SIZE - content.shape[2]
    padded = torch.nn.functional.pad(content, (0, 0, 0, 0, 0, missing)).unflatten(2, (pages, PAGE_SIZE))
    written = (torch.arange(pages * PAGE_SIZE) < content.shape[2]).view(pages, PAGE_SIZE)
    return padded.transpose(3, 4), written


@dataclass
class Session:
    """`tokens` are committed, `run` have KV."""

    tokens: list[int]
    prompt: int
    dense: bool
    kv: SequenceKV = field(default_factory=SequenceKV)
    drafted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv.dense = self.dense

    @property
    def run(self) -> tuple[int, ...]:
        return tuple((self.tokens + self.drafted)[: self.kv.length])

    @property
    def unread(self) -> int:
        return len(self.tokens) - 1 - self.kv.length


def make(gpu_pages: int, pages: int = PAGES, longest: int = LONGEST) -> TieredKV:
    return TieredKV(LAYERS, HEADS, DIM, gpu_pages, pages, longest, torch.float32, DEVICE)


def write(kv: TieredKV, sequence: SequenceKV, tokens: tuple[int, ...], count: int, layer: int) -> None:
    """Write the KV of the last `count` of `tokens` into the GPU pages that they have."""
    at = np.arange(len(tokens) - count, len(tokens))
    gpu_pages = torch.from_numpy(kv.gpu_pages(sequence)[at // PAGE_SIZE].astype(np.int64)).to(DEVICE)
    assert (gpu_pages >= 0).all()
    offsets = torch.from_numpy(at % PAGE_SIZE).to(DEVICE)
    for which, pages in enumerate((kv.k_pages, kv.v_pages)):
        pages[layer][gpu_pages, :, offsets] = contents(tokens)[layer, which, at].to(DEVICE)


def stage(kv: TieredKV, sequences: list[SequenceKV]) -> StagedReads:
    (staged,) = kv.stage(sequences)
    return staged


def check_staged(kv: TieredKV, sequences: list[tuple[SequenceKV, tuple[int, ...]]]) -> None:
    """Whole sequences, layer by layer."""
    staged = stage(kv, [sequence for sequence, _ in sequences])
    for layer in range(LAYERS):
        check_layer(staged, layer, sequences)


def next_round(kv: TieredKV) -> Tensor:
    return torch.tensor([kv.next_round()], dtype=torch.int32, device=DEVICE)


def check_layer(staged: StagedReads, layer: int, sequences: list[tuple[SequenceKV, tuple[int, ...]]]) -> None:
    together = [pages.cpu() for pages in staged.layer(layer)]
    for (_, tokens), table in zip(sequences, staged.tables, strict=True):
        if not tokens:
            continue
        wanted, written = in_pages(contents(tokens)[layer : layer + 1], len(table))
        for which, pages in enumerate(together):
            got = pages[table].transpose(1, 2)[written]
            assert torch.equal(got, wanted[0, which].transpose(1, 2)[written])


@dataclass
class Listed:
    """Random blocks of some sequences for each layer and head, in any order, with nonsense behind them."""

    lists: Tensor
    counts: Tensor
    tables: Tensor
    per_block: int

    @staticmethod
    def draw(rng: np.random.Generator, kvs: list[SequenceKV], per_block: int, share: float) -> "Listed":
        blocks = [-(-len(kv.pages) // per_block) for kv in kvs]
        width = max(blocks)
        lists = rng.integers(-5, 1000, (LAYERS, len(kvs), HEADS, width), dtype=np.int32)
        counts = np.zeros(lists.shape[:3], np.int32)
        for index in np.ndindex(*lists.shape[:3]):
            chosen = np.flatnonzero(rng.random(blocks[index[1]]) < share)
            counts[index] = len(chosen)
            lists[index][: len(chosen)] = rng.permutation(chosen)
        tables = np.full((len(kvs), width * per_block), -1, np.int32)
        for row, kv in enumerate(kvs):
            tables[row, : len(kv.pages)] = kv.pages
        return Listed(*(torch.from_numpy(array) for array in (lists, counts, tables)), per_block)

    def rows(self, layer: int) -> set[int]:
        """The pages of heads that a layer lists."""
        found: set[int] = set()
        for sequence, head in np.ndindex(*self.counts.shape[1:]):
            blocks = self.lists[layer, sequence, head, : int(self.counts[layer, sequence, head])]
            columns = (blocks[:, None] * self.per_block + torch.arange(self.per_block)).flatten()
            pages = self.tables[sequence, columns.long()]
            found |= {int(page) * HEADS + head for page in pages[pages >= 0]}
        return found

    def check(
        self, kv: TieredKV, lines: Tensor, layer: int, sequences: list[tuple[SequenceKV, tuple[int, ...]]]
    ) -> None:
        """Page by page, what lies in the cache lines is what the model has."""
        rows = [head_rows(pages[layer]).cpu() for pages in (kv.k_pages, kv.v_pages)]
        for i, (_, tokens) in enumerate(sequences):
            wanted, written = in_pages(contents(tokens)[layer : layer + 1], self.tables.shape[1])
            for head in range(HEADS):
                count = int(self.counts[layer, i, head])
                columns = self.lists[layer, i, head, :count, None] * self.per_block
                columns = (columns + torch.arange(self.per_block)).flatten().long()
                at = lines[layer, i, head, : count * self.per_block].cpu().long()
                for which in range(2):
                    got = rows[which][at].view(-1, PAGE_SIZE, DIM)[written[columns]]
                    assert torch.equal(got, wanted[0, which, columns, head][written[columns]])


class Tiers(RuleBasedStateMachine):
    """Sessions read prompts, run rounds that are judged, are released and aborted, as the verifier does it."""

    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Session] = []
        self.stored: dict[int, int] = {}  # checksums of the pages in the backing store

    @initialize(gpu_pages=st.sampled_from([5, 7, 9, 12, PAGES]))
    def start(self, gpu_pages: int) -> None:
        self.kv = make(gpu_pages)
        self.kv.keep_group_means(GROUP, 5 * LONGEST // GROUP)

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        blocks=st.lists(st.sampled_from(BLOCKS), max_size=6),
        tail=st.lists(st.integers(1, 3), max_size=36),
        dense=st.booleans(),
    )
    def open(self, blocks: list[list[int]], tail: list[int], dense: bool) -> None:
        tokens = [*(t for block in blocks for t in block), *tail] or [1]
        session = Session(tokens, len(tokens), dense)
        covered = self.kv.reuse_prefix(session.kv, tokens[:-1])
        assert covered == session.kv.length
        self.reached["reused"] += covered > 0
        self.live.append(session)

    def plan(self, data: st.DataObject) -> list[tuple[Session, int]]:
        """Some sessions, and how many tokens each is to run: of its prompt, or a round."""
        indices = data.draw(st.lists(st.integers(0, len(self.live) - 1), min_size=1, max_size=3, unique=True))
        planned = []
        for session in (self.live[index] for index in indices):
            room = LONGEST - session.kv.length - 1
            if session.unread:
                most = min(session.unread, 64)
                planned.append((session, data.draw(st.integers(1, most) | st.just(most))))
            elif room > 0:
                session.drafted = data.draw(st.lists(st.integers(1, 3), max_size=min(room, GAMMA)))
                planned.append((session, 1 + len(session.drafted)))
        return planned

    def begin(self, planned: list[tuple[Session, int]]) -> bool:
        """Whether there is room, which is just when all that is being written fits into GPU pages."""
        work = [(session.kv, count) for session, count in planned]
        before = [(s.kv.length, list(s.kv.pages)) for s in self.live]
        missing = sum(pages_for(kv.length + count) - len(kv.pages) for kv, count in work)
        writing = {id(kv): pages_for(kv.length + count) - kv.length // PAGE_SIZE for kv, count in work}
        partial = [1 for s in self.live if s.kv.length % PAGE_SIZE and id(s.kv) not in writing]
        fits = missing <= self.kv.pool.available
        has_gpu_pages = sum(writing.values()) + len(partial) <= self.kv.resident.count
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # what is stored decides what is drawn: the same each time
        active, free = self.kv.offload_active, self.kv.pool.free
        try:
            self.kv.begin_pass(work)
        except OutOfPages as error:
            assert not (fits and has_gpu_pages)
            assert ("raise --kv-memory, or lower" in str(error)) == fits
            assert [(s.kv.length, s.kv.pages) for s in self.live] == before
            self.reached["out of GPU pages" if fits else "out of pages"] += 1
            return False
        assert fits and has_gpu_pages
        self.reached["offload active"] += self.kv.offload_active and not active
        self.reached["active again"] += self.kv.offload_active and not active and self.kv.counters.offloads > 1
        self.reached["no longer active"] += active and not self.kv.offload_active
        self.reached["evicted"] += missing > free
        return True

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        seed=st.integers(0, 10**6),
        share=st.sampled_from([0.1, 0.4, 1.0]),
        per_block=st.sampled_from([1, 1, 2, 4]),
        aborted=st.sampled_from([False, False, False, True]),
    )
    def run_pass(self, data: st.DataObject, seed: int, share: float, per_block: int, aborted: bool) -> None:
        """GPU pages are given, lists requested, new KV written, all of it read; then rounds are judged."""
        planned = self.plan(data)
        if not planned or not self.begin(planned):
            for session in self.live:
                session.drafted.clear()
            return
        self.run_planned(planned, seed, share, per_block)
        for session, count in planned:
            session.kv.length += count
        for session, _ in planned:
            if aborted and session is planned[0][0]:
                self.end(session)
            else:
                self.judge(session, data)

    def run_planned(self, planned: list[tuple[Session, int]], seed: int, share: float, per_block: int) -> None:
        self.check_means([session.kv for session, _ in planned])
        after = [(s.kv, tuple((s.tokens + s.drafted)[: s.kv.length + count])) for s, count in planned]
        if self.kv.offload_active and seed % 3:
            self.read_listed(np.random.default_rng(seed), planned, after, per_block, share)
        elif self.kv.offload_active and sum(len(kv.pages) for kv, _ in after) <= self.kv.memory.staged_pages:
            staged = stage(self.kv, [kv for kv, _ in after])
            for layer in range(LAYERS):
                self.write(planned, after, layer)
                check_layer(staged, layer, after)
            self.reached["staged"] += 1
        else:
            for layer in range(LAYERS):
                self.write(planned, after, layer)

    def placed(self, layer: int, wanted: set[int]) -> int:
        """How many pages that miss a request will find cache lines for."""
        tables = self.kv.memory.tables
        hits = {line for row in wanted if (line := int(tables.line_of[layer, row])) >= 0}
        dirty, stamps = tables.dirty[layer].tolist(), tables.stamps[layer].tolist()
        free = sum(not dirty[i] and stamps[i] < self.kv._round and i not in hits for i in range(tables.lines))
        return min(len(wanted) - len(hits), free)

    def write(
        self, planned: list[tuple[Session, int]], after: list[tuple[SequenceKV, tuple[int, ...]]], layer: int
    ) -> None:
        for (_, count), (kv, tokens) in zip(planned, after, strict=True):
            write(self.kv, kv, tokens, count, layer)

    def read_listed(
        self,
        rng: np.random.Generator,
        planned: list[tuple[Session, int]],
        after: list[tuple[SequenceKV, tuple[int, ...]]],
        per_block: int,
        share: float,
    ) -> None:
        """Read all that is listed, if the GPU has cache lines for it; else the pass says how many pages overflow."""
        kv, tables = self.kv, self.kv.memory.tables
        sequences = [sequence for sequence, _ in after]
        listed = Listed.draw(rng, sequences, per_block, share)
        round = next_round(kv)
        overflow = fetched = 0
        for layer in range(LAYERS):
            rows = listed.rows(layer)
            placed = self.placed(layer, rows)
            fetched += placed
            overflow += sum(int(tables.line_of[layer, row]) < 0 for row in rows) - placed
        arguments = listed.lists, listed.counts, per_block * PAGE_SIZE, listed.tables
        lists, counts, size, pages = (a if isinstance(a, int) else a.to(DEVICE) for a in arguments)
        done = kv.fetch_plan(lists, counts, size, pages, round)
        assert int(done.overflow) == overflow
        assert int(done.transfers.counts.sum()) == fetched
        for layer in range(LAYERS):
            self.write(planned, after, layer)
            done.wait(layer)
            if not overflow:
                listed.check(kv, done.lines, layer, after)
        self.reached["overflow" if overflow else "listed"] += 1
        self.reached["fetched"] += fetched > 0

    def check_means(self, kvs: list[SequenceKV]) -> None:
        """Made before anything of the pass is written, also from pages that are in the backing store alone."""
        pool = self.kv.extend_group_means(kvs, [kv.length for kv in kvs])
        for session in self.live:
            groups = session.kv.groups
            if not groups:
                continue
            content = contents(session.run)[:, :, : len(groups) * GROUP].unflatten(2, (-1, GROUP)).double()
            for wanted, made in zip(content.mean(3).unbind(1), (pool.k, pool.v), strict=True):
                torch.testing.assert_close(made[:, groups].cpu().double(), wanted, rtol=1e-6, atol=1e-3)
            self.reached["means"] += 1

    def judge(self, session: Session, data: st.DataObject) -> None:
        """Some of a round is kept, and one token added; full pages that are dense and committed are offered."""
        if session.kv.length >= len(session.tokens):
            accepted = data.draw(st.integers(0, len(session.drafted)))
            session.tokens += [*session.drafted[:accepted], data.draw(st.integers(1, 3))]
            self.reached["rolled back"] += accepted < len(session.drafted)
        session.drafted.clear()
        self.kv.truncate(session.kv, min(session.kv.length, len(session.tokens) - 1))
        offered = session.tokens if session.dense else session.tokens[: session.prompt]
        self.kv.index_prefix(session.kv, offered[: session.kv.length])

    @precondition(lambda self: len(self.live) > 2)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.end(self.live[data.draw(st.integers(0, len(self.live) - 1))])

    @precondition(lambda self: len(self.live) > 1 and self.kv.offload_active)
    @rule()
    def close_all(self) -> None:
        for session in list(self.live):
            self.end(session)

    def end(self, session: Session) -> None:
        self.kv.release(session.kv)
        self.live = [other for other in self.live if other is not session]

    @invariant()
    def gpu_pages_and_store_are_in_order(self) -> None:
        self.kv.check_integrity()

    @invariant()
    def cache_lines_hold_what_is_stored(self) -> None:
        """Every cache line that the clock has is looked at."""
        kv = self.kv
        if not kv.offload_active:
            return
        for layer in range(LAYERS):
            page_in, dirty = (part[layer].long() for part in (kv.memory.tables.page_in, kv.memory.tables.dirty))
            lines = ((page_in >= 0) & (dirty == 0)).nonzero()[:, 0]
            for near, far in zip((kv.k_pages, kv.v_pages), zip(*kv.memory.stored, strict=True), strict=True):
                got = head_rows(near[layer])[lines].cpu()
                assert torch.equal(got, head_rows(far[layer])[page_in[lines].cpu()])

    @invariant()
    def sessions_read_back(self) -> None:
        """Whole ones, from wherever they lie."""
        part: list[Session] = []
        for session in [*(s for s in self.live if s.run), None]:
            together = sum(len(s.kv.pages) for s in [*part, *([session] if session else [])])
            if part and (session is None or together > self.kv.memory.staged_pages):
                if self.kv.offload_active:
                    check_staged(self.kv, [(s.kv, s.run) for s in part])
                part = []
            if session is not None:
                part.append(session)
                self.check_where_it_lies(session)

    def check_where_it_lies(self, session: Session) -> None:
        wanted, written = in_pages(contents(session.run), len(session.kv.pages))
        pages, gpu_pages = session.kv.table().copy(), self.kv.gpu_pages(session.kv)
        on_gpu, stored = gpu_pages >= 0, self.kv.store.holds[pages]
        assert (on_gpu | stored).all()
        for sides, where, chosen in (
            ((self.kv.k_pages, self.kv.v_pages), gpu_pages, on_gpu),
            ((*zip(*self.kv.memory.stored, strict=True),), pages, stored),
        ):
            at = torch.from_numpy(where[chosen].astype(np.int64))
            there = torch.from_numpy(written.numpy()[chosen])
            for which, layers in enumerate(sides):
                for layer, lying in enumerate(layers):
                    got = lying[at.to(lying.device)].cpu().transpose(1, 2)[there]
                    assert torch.equal(got, wanted[layer, which][chosen].transpose(1, 2)[there])

    @invariant()
    def what_is_stored_never_changes(self) -> None:
        """From the copy of a page to its release; of pages that are kept for their prefix too."""
        kept = {int(page): self.stored.get(int(page)) for page in np.flatnonzero(self.kv.store.holds)}
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        layers = [part for side in zip(*self.kv.memory.stored, strict=True) for part in side]
        for page, before in kept.items():
            now = zlib.crc32(b"".join(layer[page].numpy().tobytes() for layer in layers))
            assert before in (None, now)
            kept[page] = now
        self.stored = kept

    def teardown(self) -> None:
        for session in list(self.live):
            self.end(session)
        if hasattr(self, "kv"):
            assert self.kv.pool.held == 0
            self.kv.begin_pass([])
            self.kv.check_integrity()


def test_sessions_over_tiers() -> None:
    """The machine holds, and gets to all that is to be tested."""
    Tiers.reached.clear()
    run_state_machine_as_test(
        Tiers, settings=settings(max_examples=50 if DEVICE == "cpu" else 30, stateful_step_count=50, derandomize=True)
    )
    if DEVICE != "cpu":  # copies end when they end: what the machine gets to is not the same each time
        return
    # It runs out of pages of either kind only in some runs; test_offload.py always does.
    assert {name for name, count in Tiers.reached.items() if count} - {"out of pages", "out of GPU pages"} == {
        *("offload active", "active again", "no longer active", "evicted", "reused", "rolled back"),
        *("listed", "fetched", "overflow", "staged", "means"),
    }


# What the machine reaches only now and then


def fill(kv: TieredKV, tokens: list[int], chunk: int = 2 * PAGE_SIZE) -> SequenceKV:
    """A sequence that has read `tokens` in chunks."""
    sequence = SequenceKV()
    for start in range(0, len(tokens), chunk):
        run_one(kv, sequence, tokens[: start + chunk])
    return sequence


def run_one(kv: TieredKV, sequence: SequenceKV, tokens: list[int]) -> None:
    """One pass over one sequence, which ends with `tokens`."""
    count = len(tokens) - sequence.length
    kv.begin_pass([(sequence, count)])
    for layer in range(LAYERS):
        write(kv, sequence, tuple(tokens), count, layer)
    sequence.length = len(tokens)


def text(kind: int, pages: int) -> list[int]:
    """As many pages, and a token more."""
    return [*range(kind, kind + pages * PAGE_SIZE), kind]


def test_a_page_that_was_left_to_the_store_is_not_cut() -> None:
    """Its copy would say what was there before; pages behind it, and whole pages, are given back as ever."""
    kv = make(gpu_pages=9, pages=12)
    sequence = fill(kv, text(1, 3))
    run_one(kv, sequence, text(1, 4))
    assert sequence.stored == 3
    for length in (1, 2 * PAGE_SIZE + 1, 3 * PAGE_SIZE - 1):
        with pytest.raises(ValueError, match=f"cannot truncate to {length}: the page there is in the backing store"):
            kv.truncate(sequence, length)
    kv.truncate(sequence, 3 * PAGE_SIZE + 1)
    assert (sequence.stored, len(sequence.pages)) == (3, 4)
    kv.truncate(sequence, 2 * PAGE_SIZE)
    assert (sequence.stored, len(sequence.pages)) == (2, 2)
    run_one(kv, sequence, [*text(1, 2)[:-1], *[99] * 20])
    run_one(kv, sequence, [*text(1, 2)[:-1], *[99] * 21])
    assert sequence.stored == 3
    kv._copy_to_store()
    kv.store.take_up_copies(wait=True)
    kv.check_integrity()
    assert kv.store.holds[sequence.pages].tolist() == [True, True, True, False]


def test_what_may_be_written_anew_stays_on_the_gpu() -> None:
    """Full pages that a pass is to write once more do not leave for the store; once they have been, they do."""
    kv = make(gpu_pages=6, pages=14)
    sequence = fill(kv, text(1, 2))
    sequence.settled = sequence.length
    run_one(kv, sequence, text(1, 4))
    others = [fill(kv, text(3, 2)), fill(kv, text(5, 1))]
    assert kv.offload_active
    assert kv.store.holds[sequence.pages].tolist() == [True, True, False, False, False]
    kv.truncate(sequence, 2 * PAGE_SIZE + 1)
    written = [*text(1, 2), *[99] * 30]
    run_one(kv, sequence, written)
    kv.check_integrity()
    check_staged(kv, [(sequence, tuple(written))])
    sequence.settled = sequence.length
    run_one(kv, others[1], text(5, 2))
    run_one(kv, sequence, [*written, 99])
    kv._copy_to_store()
    kv.store.take_up_copies(wait=True)
    assert kv.store.holds[sequence.pages].tolist() == [True, True, True, False]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's copies have real events")
def test_a_copy_counts_for_what_the_page_held_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is freed while it is copied, filled again and copied again: the first copy's end says nothing of it."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=lambda _: None))
    kv = make(gpu_pages=PAGES)
    copied = []
    for kind in (1, 2):
        sequence = fill(kv, text(kind, 1)[:-1])
        kv.begin_pass([])
        kv._copy_to_store()
        event = SimpleNamespace(arrived=False)
        event.query = lambda event=event: event.arrived
        kv.store._copies[-1] = kv.store._copies[-1][0], event
        copied.append((list(sequence.pages[:1]), event))
        if kind == 1:
            kv.release(sequence)
    assert copied[0][0] == copied[1][0]
    page = copied[0][0][0]
    for (_, event), stored in zip(copied, (False, True), strict=True):
        event.arrived = True
        kv.begin_pass([])
        assert bool(kv.store.holds[page]) is stored


def test_what_layers_chose_last_is_prefetched() -> None:
    """The same blocks are there before their layers choose; others take the room of what was prefetched in vain."""
    kv, tokens = make(gpu_pages=6), text(1, 8)
    sequence = fill(kv, tokens, chunk=PAGE_SIZE)
    away, room = np.flatnonzero(kv.resident.of[sequence.pages] < 0), kv.resident.free  # room: pages of the clock
    assert len(away) >= 2 * room > 0
    tables = torch.tensor([sequence.pages], dtype=torch.int32)
    remembered = torch.full((2, LAYERS, HEADS, room + 1), -1, dtype=torch.int32, device=DEVICE)
    last = LastChoices(remembered, torch.zeros(1, dtype=torch.int32, device=DEVICE), PAGE_SIZE)

    def choose(chosen: np.ndarray) -> tuple[int, list[int]]:
        """Return how many pages of the chosen blocks were there before the first layer chose, and the counts."""
        lists = torch.from_numpy(chosen).int().expand(LAYERS, 1, HEADS, -1).contiguous()
        listed = Listed(lists, torch.full(lists.shape[:3], room, dtype=torch.int32), tables, 1)
        fetcher = kv.chosen_fetcher(tables.to(DEVICE), next_round(kv), last)
        lines = kv.memory.tables.line_of
        there = sum(int(lines[layer, row]) >= 0 for layer in range(LAYERS) for row in listed.rows(layer))
        for layer in range(LAYERS):
            of_layer = BlockLists(lists[layer].to(DEVICE), listed.counts[layer].to(DEVICE), PAGE_SIZE)
            slots = fetcher(layer, of_layer).slots
            listed.check(kv, slots.expand(LAYERS, *slots.shape), layer, [(sequence, tuple(tokens))])
        return there, fetcher.end().tolist()

    count, (one, other) = LAYERS * HEADS * room, (away[:room], away[-room:])
    assert choose(one) == (0, [count, count, 0, count])
    kv.memory.drop_pages([sequence.pages[page] for page in one])
    assert choose(one) == (count, [count, count, 0, count])
    kv.memory.drop_pages([sequence.pages[page] for page in one])
    assert choose(other) == (0, [count, 2 * count, 0, 2 * count])
    assert remembered[0, 0, 0].tolist() == [*other, -1]
