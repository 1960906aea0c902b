"""KV in tiers: all pages have a home in host memory or on a neighbour GPU, and as many as fit lie on the GPU.

GPU memory is cut into frames: one page of all layers and KV heads each. What becomes of a page:

    grow ──> in a frame, written ──(full)──> copied home ──(frames are short)──> left to the clock ──> only at home
             by the steps                    in the background                   the frame's slots        │   ▲
                                                                                 hold it still    fetched │   │ evicted
                                                                                                          ▼   │
                                                                                 in a slot, for a (page, layer, head)

As long as every page of a pass is in a frame, the pass is what it would be without tiers: block tables name frames.
When frames run short for the first time, KV `spills`: the residency tables (kernels.residency) are made, full pages
are left to the clock as soon as they are home, and whoever reads goes by the tables: sparse steps fetch what they
list (engine.tier_reads.fetch_listed), others have their pages brought together (StagedReads). Frames are given out
from those that the clock has; what it had put there is forgotten, since it is at home too.

Only full pages are copied home, once: what a round has rolled back is never copied, and partial pages stay in frames.

Home is made of segments: a run of page numbers each, in one memory, with a link of its own. The neighbour's, where
there is one (engine.peer_memory), has the first numbers, which are given out first.
"""

import os
import threading
from collections import deque
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from engine.host_memory import host_zeros
from engine.paged_kv import PAGE_SIZE, GroupMeanPool, OutOfPages, PagedKV, PagePool, SequenceKV, pages_for
from engine.prefetches import Account, Prefetch, Prefetches, account_for
from kernels.backends import default_backend
from kernels.group_means import make_group_means
from kernels.kv_gather import LayerCopies, gather_blocks, layer_copies
from kernels.residency import clear_tables, drop_pages, empty_tables, mark_home, pin_frames

COPIED_AT_ONCE = 64  # full pages that are waited for before they are copied home, unless frames are short
CLOCK_SHARE = (
    4  # once KV has spilled, at least 1 / CLOCK_SHARE of the frames is left to the clock, where that can be
)
RESERVED_SHARE, MOST_RESERVED = (
    64,
    64,
)  # frames kept from the clock: 1 / RESERVED_SHARE of all, so many at most
# That fetch, over all links: enough for the host's (docs/performance.md). Attention has room for no more beside it
# (kernels.paged_attention.LEFT_FREE).
PROGRAMS = 8


@dataclass
class TierCounters:
    """Pages are of one layer and KV head; of those copied home, whole pages.

    hit: listed by a step, and in a slot already. fetched: into slots, for a step that listed them; late: of blocks
    that were not announced; left_out: of late ones that means stood in for. prefetched: into slots before a step listed
    them; wasted: of these, not read by the next step that could have. prefetches, skipped_prefetches: since too many
    were outstanding. refused: had no slot, so that the step ran again.
    staged: brought from home for a pass that reads everything; stages: such passes. pages_from_peer: of those fetched,
    prefetched and staged, what a neighbour GPU had. wait_seconds: of each layer, where that is measured.
    """

    hit_pages: int = 0
    fetched_pages: int = 0
    pages_from_peer: int = 0
    late_pages: int = 0
    left_out_pages: int = 0
    prefetched_pages: int = 0
    wasted_pages: int = 0
    prefetches: int = 0
    skipped_prefetches: int = 0
    refused_pages: int = 0
    staged_pages: int = 0
    stages: int = 0
    copied_home: int = 0
    spills: int = 0
    wait_seconds: dict[int, float] = field(default_factory=dict)

    def add_waits(self, moments: np.ndarray, layers: list[int]) -> None:
        """moments: int64 [layers, 2], nanoseconds, of one step."""
        for layer, (began, ended) in zip(layers, moments.tolist(), strict=True):
            self.wait_seconds[layer] = self.wait_seconds.get(layer, 0.0) + (ended - began) * 1e-9

    def values(self, page_bytes: int, heads: int) -> dict[str, float]:
        """By name; page_bytes: keys and values of a page of one layer and head. heads: of all layers."""
        counts = {item.name: float(getattr(self, item.name)) for item in fields(self) if item.type is int}
        from_home = ("fetched_pages", "prefetched_pages", "staged_pages")
        counts["bytes_fetched"] = page_bytes * sum(counts[name] for name in from_home)
        counts["bytes_from_peer"] = page_bytes * counts["pages_from_peer"]
        counts["bytes_copied_home"] = page_bytes * heads * counts["copied_home"]
        waits = {f"wait_seconds_layer_{layer}": wait for layer, wait in self.wait_seconds.items()}
        return counts | waits


@dataclass
class _Copy:
    """Pages on their way home; `done` is None where copying does not return before it is done."""

    pages: list[int]
    done: torch.cuda.Event | None


@dataclass
class _HomeState:
    """Which pages are home or on their way there, and may leave their frames; in the order in which they got there."""

    waiting: dict[int, bool] = field(
        default_factory=dict
    )  # full pages to be copied; whether they are read densely
    copying: dict[int, bool] = field(default_factory=dict)
    copies: deque[_Copy] = field(default_factory=deque)
    movable: dict[int, None] = field(default_factory=dict)  # home and in a frame
    movable_dense: dict[int, None] = field(default_factory=dict)

    def forget(self, page: int) -> None:
        for kept in (self.waiting, self.copying, self.movable, self.movable_dense):
            kept.pop(page, None)
        for copy in self.copies:  # a copy of what the page holds next does not count until it is done itself
            if page in copy.pages:
                copy.pages.remove(page)


# Keys and values of each layer, [pages, kv_heads, PAGE_SIZE, head_dim].
Pages = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Segment:
    """Pages that have their home in one memory, and the way from there.

    pages: their numbers; on_peer: whether the memory is a neighbour GPU's. fetches: into the slots of all layers.
    stream: for what the link carries beside the model; None on a CPU.
    """

    pages: range
    on_peer: bool
    keys: list[Tensor]
    values: list[Tensor]
    fetches: LayerCopies
    stream: torch.cuda.Stream | None

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, a row for each page and head."""
        return head_rows(self.keys[index]), head_rows(self.values[index])


class TieredKV(PagedKV):
    """A PagedKV whose page numbers are places at home. A runner calls `begin` before each pass.

    frames: pages that lie on the GPU at once; pages: at home, in all. longest: tokens of a sequence, at most, which
    StagedReads has room for. means_for_late: steps that let group means stand in for what is not read have them stand
    in for late blocks too, instead of fetching these. measures_waits: how long layers wait for what is fetched.
    kept_layers: whose pages all stay on the GPU, at their numbers. tables: rows are the other layers, a page of them is
    page * kv_heads + head, a slot frame * kv_heads + head; they say nothing until KV has spilled.
    peer: memory of a neighbour GPU for the first pages (engine.peer_memory.peer_pages); contents do not matter.
    k_home, v_home: of each layer in tiers, the other pages on the host, [pages, kv_heads, PAGE_SIZE, head_dim].
    home: k_home and v_home, if they are there already (for a GPU pinned; layers may share one if contents do not
    matter). segments: all of home, in the order of page numbers. Raises MemoryError if the host has no room.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        frames: int,
        pages: int,
        longest: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        means_for_late: bool = False,
        measures_waits: bool = False,
        kept_layers: tuple[int, ...] = (),
        home: Pages | None = None,
        peer: Pages | None = None,
    ) -> None:
        if torch.device(device).type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise ValueError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 lets no copies run beside a step, which waits for them: unset it, or "
                "leave --host-kv-memory out"
            )
        if not 0 < frames <= pages:
            raise ValueError(f"{frames} frames on the GPU for {pages} pages at home: expected 1 to {pages}")
        super().__init__(num_layers, kv_heads, head_dim, frames, dtype, device)
        shape = (pages, kv_heads, PAGE_SIZE, head_dim)
        self.kept_layers = kept_layers
        self.tiered_layers = [layer for layer in range(num_layers) if layer not in kept_layers]
        self.peer_pages = len(peer[0][0]) if peer is not None and self.tiered_layers else 0
        if self.peer_pages >= pages:
            raise ValueError(
                f"{self.peer_pages} pages on the neighbour of {pages} at home: the host has some, too"
            )
        for layer in kept_layers:
            self.k_pages[layer], self.v_pages[layer] = (
                torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2)
            )
        on_host, on_peer = ((count, *shape[1:]) for count in (pages - self.peer_pages, self.peer_pages))
        for given, wanted in ((home, on_host), (peer, on_peer)):
            if given is not None and any(part.shape != wanted for part in (*given[0], *given[1])):
                raise ValueError(f"pages at home that are there already must be {wanted}")
        self.k_home, self.v_home = home or self._make_home(on_host, dtype)
        self._freed: list[int] = []
        self._last_work: list[SequenceKV] = []
        self.pool = PagePool(pages, self._freed, preferred=self.peer_pages)
        self.num_frames = frames
        self.frame_of = np.full(pages, -1, np.int32)
        self._at_home = np.zeros(pages, bool)
        self._away = 0  # pages that are at home and in no frame
        self._free_frames = deque(range(frames))
        self._reserve: deque[int] = deque()  # once KV has spilled: free frames that are not the clock's
        self._home = _HomeState()
        self._home_stream, self.link_stream = (
            # Before what computes, or it would find no room on the multiprocessors.
            torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
            for _ in range(2)
        )
        self.segments = [self._make_segment(False, (self.k_home, self.v_home), self.link_stream)]
        if peer is not None and self.peer_pages:
            stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
            self.segments.insert(0, self._make_segment(True, peer, stream))
        rows = max(1, len(self.tiered_layers))
        self.tables = empty_tables(rows, pages * kv_heads, frames * kv_heads, self.device)
        self.spilled = False
        self.means_for_late, self.measures_waits = means_for_late, measures_waits
        self.round = 0  # of the residency tables
        self._step_round: int | None = None  # of the last step that fetches
        links = len(self.segments)
        self.link_programs = PROGRAMS // links
        self.prefetches = Prefetches(len(self.tiered_layers), links, self.link_programs, self.device)
        self._turn = threading.Lock()  # whose the tables are, of the threads that launch
        self._tables_free: torch.cuda.Event | None = None  # when the last of these is through with them
        self._link_free: torch.cuda.Event | None = None  # and when what its step fetches has come
        self._told_free = False
        staged = (2, pages_for(longest), kv_heads, PAGE_SIZE, head_dim)
        self.k_staged, self.v_staged = (
            torch.zeros(staged, dtype=dtype, device=self.device) for _ in range(2)
        )
        self.counters = TierCounters()

    def _make_home(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = ([host_zeros(shape, dtype, self.device) for _ in self.tiered_layers] for _ in range(2))
        return keys, values

    def _make_segment(self, on_peer: bool, home: Pages, stream: torch.cuda.Stream | None) -> Segment:
        keys, values = home
        first = 0 if on_peer else self.peer_pages
        pages = range(first, first + (len(keys[0]) if keys else 0))
        copies = layer_copies(
            [(head_rows(k), head_rows(v)) for k, v in zip(keys, values, strict=True)],
            [(head_rows(self.k_pages[i]), head_rows(self.v_pages[i])) for i in self.tiered_layers],
            self.device,
            first * self.kv_heads if self.peer_pages else None,  # alone, it has all that is asked for
        )
        return Segment(pages, on_peer, keys, values, copies, stream)

    @property
    def backend(self) -> str:
        return default_backend(self.device)

    @property
    def staged_pages(self) -> int:
        """That StagedReads has room for."""
        return self.k_staged.shape[1]

    @property
    def totals(self) -> dict[str, float]:
        """Counters since the start, by name; those of a neighbour GPU where there is one."""
        page_bytes = 2 * self.k_pages[0][0, 0].nbytes
        values = self.counters.values(page_bytes, len(self.tiered_layers) * self.kv_heads)
        told = {name: value for name, value in values.items() if self.peer_pages or "from_peer" not in name}
        return {f"kv_{name}": value for name, value in told.items()}

    @property
    def gauges(self) -> dict[str, float]:
        return {
            "kv_frames": self.num_frames,
            "kv_frames_written": self.num_frames - self._givable,  # the clock has the others
            "kv_spilled": float(self.spilled),
            **({"kv_peer_pages": self.peer_pages} if self.peer_pages else {}),
        }

    def frames(self, sequence: SequenceKV) -> np.ndarray:
        """int32 [pages], the frame of each page, -1 where it has none."""
        return self.frame_of[sequence.table()]

    @property
    def lies_apart(self) -> bool:
        return bool(self.kept_layers)

    def is_resident(self, sequence: SequenceKV) -> bool:
        """Whether all pages are in frames, so that block tables can name these."""
        return not self._away or self._is_framed(sequence.table())

    def _is_framed(self, pages: np.ndarray) -> bool:
        # The first page is the first to leave.
        return not len(pages) or bool(self.frame_of[pages[0]] >= 0 and (self.frame_of[pages] >= 0).all())

    def next_round(self) -> int:
        self.round += 1
        return self.round

    def step_round(self) -> int:
        """The next round, of a step: what it lists is needed until another step begins."""
        self._told_free = False
        self._step_round = round = self.next_round()
        return round

    def await_prefetches(self) -> None:
        """Before the tables say where whole sequences lie: let the current stream wait for all that is on its way."""
        self._told_free = False
        self.prefetches.wait_for_copies()

    def oldest_for_prefetch(self, round: int) -> int:
        """A step may run: what it reads is not to be taken."""
        oldest = self.prefetches.oldest(round)
        return oldest if self._step_round is None else min(self._step_round, oldest)

    # The tables are used by one thread at a time, and on the device by one stream at a time.

    def take_tables(self) -> None:
        """Let this thread launch on the tables; its current stream waits for the prefetches that are there already."""
        self._turn.acquire()
        self._told_free = False
        self._follow_requests()

    def _follow_requests(self) -> None:
        if self.prefetches.requested is not None:
            torch.cuda.current_stream().wait_event(self.prefetches.requested)

    def try_tables(self) -> bool:
        """The same for a prefetch, unless somebody else launches now; its stream is to `follow_tables`."""
        return self._turn.acquire(blocking=False)

    def follow_tables(self) -> None:
        """Let the current stream wait until the last steps' streams are through with the tables."""
        if self._tables_free is not None:
            torch.cuda.current_stream().wait_event(self._tables_free)

    def follow_link(self) -> None:
        """Let the current stream wait until the last step has all that it fetches: its pages go first."""
        if self._link_free is not None:
            torch.cuda.current_stream().wait_event(self._link_free)

    def tell_tables_free(
        self, free: torch.cuda.Event | None = None, link: torch.cuda.Event | None = None
    ) -> None:
        """Nothing launched so far uses the tables after `free`, the link after `link`; None: after it has ended."""
        self._told_free = True
        self._link_free = link
        if free is None and self.device.type == "cuda":
            free = torch.cuda.Event()
            free.record()
        self._tables_free = free

    def give_tables(self) -> None:
        if not self._told_free:
            self.tell_tables_free()
        self._turn.release()

    def return_tables(self) -> None:
        """After `try_tables`: who takes them next waits for `prefetches.requested`."""
        self._turn.release()

    def note_step(self, sequences: list[SequenceKV]) -> None:
        """A step of these has been launched, whatever it reads, and the tables told free."""
        for prefetch in self.prefetches.note_step(sequences):
            self._close(prefetch)

    def _close(self, prefetch: Prefetch) -> None:
        stream = self.prefetches.request_stream
        if stream is None:
            numbers = account_for(prefetch, self.tables)
            self.prefetches.accounts.append(Account(prefetch.sequences, numbers, None))
            return
        with torch.cuda.stream(stream):
            self.follow_tables()
            if prefetch.copied is not None:
                stream.wait_event(prefetch.copied)
            found = account_for(prefetch, self.tables)
            numbers = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            numbers.copy_(found, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.prefetches.requested = done
        self.prefetches.accounts.append(Account(prefetch.sequences, numbers, done))

    def take_accounts(self) -> None:
        """Count what prefetches that are over have fetched."""
        accounts, kept = self.prefetches.accounts, []
        for account in accounts:
            if account.done is not None and not account.done.query():
                kept.append(account)
                continue
            fetched, wasted, from_peer, *cold = account.numbers.tolist()
            self.counters.prefetched_pages += fetched
            self.counters.wasted_pages += wasted
            self.counters.pages_from_peer += from_peer
            for sequence, blocks in zip(account.sequences, cold, strict=False):
                sequence.prefetched += blocks * self.prefetches.block_size
        self.prefetches.accounts = kept

    def give_up_prefetches(self) -> bool:
        """Keep no slots for what was prefetched; whether there was any. What is copied is waited for."""
        if not self.prefetches.outstanding:
            return False
        self.prefetches.wait_for_copies()
        for prefetch in self.prefetches.outstanding:
            self._close(prefetch)
        self.prefetches.outstanding = []
        self._follow_requests()
        return True

    def adopt_home(self, sequence: SequenceKV) -> None:
        """Take it that the full pages of a sequence are at home, for who has put them there; they have no frames yet.

        For a new sequence: `grow` it, set its length, adopt, and `begin`, which then finds that KV has spilled.
        """
        self._forget_freed()
        full = sequence.table()[: sequence.length // PAGE_SIZE]
        if (self.frame_of[full] >= 0).any():
            raise ValueError("adopt_home is for pages that no frame was given for")
        self._away += int((~self._at_home[full]).sum())
        self._at_home[full] = True

    # Before a pass.

    def begin(self, work: list[tuple[SequenceKV, int]]) -> None:
        """Give the pages of so many tokens to come of each sequence frames, and let others leave theirs.

        Tokens of these sequences, and of those of the last pass, are committed. Raises OutOfPages if there are not
        enough pages or frames; then sequences are as before.
        """
        self._forget_freed()
        self._grow_all(work)
        for sequence in {id(s): s for s in (*self._last_work, *(s for s, _ in work))}.values():
            self._note_full_pages(sequence)
        self._last_work = [sequence for sequence, _ in work]
        self._take_up_copies(wait=False)
        if len(self._home.waiting) >= COPIED_AT_ONCE:
            self._copy_home()
        fresh: list[int] = []
        reaches_home = False
        for sequence, tokens in work:
            written = sequence.pages[sequence.length // PAGE_SIZE : pages_for(sequence.length + tokens)]
            fresh += [page for page in written if self.frame_of[page] < 0]
            old = sequence.table()[: sequence.length // PAGE_SIZE]
            reaches_home = reaches_home or (self._away > 0 and not self._is_framed(old))
        if not self.spilled and (reaches_home or len(fresh) > self._givable):
            self._spill()
        if self.spilled:
            self._leave_to_clock(len(fresh))
        if len(fresh) > self._givable:
            for sequence, _ in work:
                self.truncate(sequence, sequence.length)
            raise OutOfPages(
                f"{len(fresh)} frames wanted, {self._givable} of {self.num_frames} can be given: "
                "raise --kv-memory, or lower --max-sessions or --prefill-chunk"
            )
        self._give_frames(fresh)

    @property
    def _givable(self) -> int:
        """Frames that can be given to new pages."""
        return len(self._free_frames) + len(self._reserve)

    def _grow_all(self, work: list[tuple[SequenceKV, int]]) -> None:
        """Have pages for all or for none."""
        missing = sum(max(0, pages_for(s.length + tokens) - len(s.pages)) for s, tokens in work)
        if missing > self.pool.available:
            raise OutOfPages(
                f"{missing} pages wanted, {self.pool.available} of {self.pool.num_pages} available"
            )
        for sequence, tokens in work:
            self.grow(sequence, sequence.length + tokens)
        self._forget_freed()  # pages that were kept for their prefix, and have a new owner now

    def _forget_freed(self) -> None:
        """Of pages that no sequence holds any more, nothing is kept on the GPU."""
        if not self._freed:
            return
        freed = list(dict.fromkeys(self._freed))
        self._freed.clear()
        if self.spilled:
            drop_pages(self.tables, self._list(freed), self.kv_heads, self.backend)
        self._away -= int((self._at_home[freed] & (self.frame_of[freed] < 0)).sum())
        for page in freed:
            self._home.forget(page)
            if self.frame_of[page] >= 0:
                self._free_frames.append(int(self.frame_of[page]))
        self.frame_of[freed] = -1
        self._at_home[freed] = False
        if self.spilled and self.pool.held <= self.num_frames and not self._holds_away():
            # All that is held lies in frames: what the clock has put elsewhere is forgotten.
            self.give_up_prefetches()
            self.spilled = False
            self._free_frames.extend(self._reserve)
            self._reserve.clear()

    def _holds_away(self) -> bool:
        """Whether a sequence holds a page that is in no frame. (Others are kept for their prefix.)"""
        away = np.flatnonzero(self._at_home & (self.frame_of < 0)).tolist()
        return any(self.pool.references[page] for page in away)

    def _note_full_pages(self, sequence: SequenceKV) -> None:
        self._note(sequence, sequence.length // PAGE_SIZE)

    def _note(self, sequence: SequenceKV, count: int) -> None:
        full = sequence.table()[sequence.noted : count]
        sequence.noted = max(sequence.noted, count)
        for page in full[~self._at_home[full]].tolist():
            if page not in self._home.copying and page not in self._home.waiting:
                self._home.waiting[page] = sequence.dense

    def _copy_home(self) -> None:
        pages = list(self._home.waiting)
        if not pages:
            return
        self._home.copying |= self._home.waiting
        self._home.waiting.clear()
        lists = [(segment, *self._lists_of(segment, pages)) for segment in self.segments]
        done: torch.cuda.Event | None = None
        if self._home_stream is None:
            for part in lists:
                self._copy_layers_home(*part)
        else:
            self._home_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._home_stream):
                for part in lists:
                    self._copy_layers_home(*part)
                done = torch.cuda.Event()
                done.record()
            for _, *tensors in lists:
                for tensor in tensors:
                    tensor.record_stream(self._home_stream)
        self._home.copies.append(_Copy(pages, done))
        self.counters.copied_home += len(pages)

    def _lists_of(self, segment: Segment, pages: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of the pages that have their home there: frames, places in the segment, and how many they are."""
        held = [page for page in pages if page in segment.pages]
        places = [page - segment.pages.start for page in held]
        return self._list(self.frame_of[held].tolist()), self._list(places), self._list([len(held)])

    def _copy_layers_home(self, segment: Segment, frames: Tensor, places: Tensor, count: Tensor) -> None:
        for row, layer in enumerate(self.tiered_layers if len(places) else []):
            gather_blocks(
                (_rows(self.k_pages[layer]), _rows(self.v_pages[layer])),
                (_rows(segment.keys[row]), _rows(segment.values[row])),
                frames,
                places,
                count,
                PROGRAMS,
                self.backend,
            )

    def _take_up_copies(self, wait: bool) -> None:
        """Note what has come home. wait: let the device, not the host, wait for what is on its way."""
        copies = self._home.copies
        while copies and (wait or copies[0].done is None or copies[0].done.query()):
            copy = copies.popleft()
            if copy.done is not None:
                torch.cuda.current_stream().wait_event(copy.done)
            for page in copy.pages:
                dense = self._home.copying.pop(page)
                self._at_home[page] = True
                (self._home.movable_dense if dense else self._home.movable)[page] = None

    # Once KV has spilled.

    def _spill(self) -> None:
        clear_tables(self.tables)  # in place: captured steps hold them
        self.spilled = True
        self.counters.spills += 1
        framed = np.flatnonzero(self.frame_of >= 0)
        self._pin(framed.tolist(), self.frame_of[framed].tolist())

    def _leave_to_clock(self, wanted: int) -> None:
        """Have frames to give out, and some left for the clock."""
        home, floor = self._home, wanted + self.num_frames // CLOCK_SHARE
        leaving = list(home.movable)
        home.movable.clear()
        if self._givable + len(leaving) < floor and (home.waiting or home.copying):
            self._copy_home()
            self._take_up_copies(wait=True)
            leaving += home.movable
            home.movable.clear()
        while self._givable + len(leaving) < floor and home.movable_dense:
            leaving.append(next(iter(home.movable_dense)))
            del home.movable_dense[leaving[-1]]
        if not leaving:
            return
        mark_home(self.tables, self._list(leaving), self.kv_heads, self.backend)
        self._free_frames.extend(self.frame_of[leaving].tolist())
        self.frame_of[leaving] = -1
        self._away += len(leaving)

    def _give_frames(self, pages: list[int]) -> None:
        """From the clock's frames; while prefetches are copied, which may go there, from those in reserve."""
        copying = self.prefetches.are_copying
        if copying and len(pages) > len(self._reserve):
            self.prefetches.wait_for_copies()
            copying = False
        for page in pages:
            reserved = copying or not self._free_frames
            self.frame_of[page] = (self._reserve if reserved else self._free_frames).popleft()
        if self.spilled:
            self._pin(pages, self.frame_of[pages].tolist())
            if not copying:
                self._fill_reserve()

    def _fill_reserve(self) -> None:
        """As far as the clock keeps its share."""
        wanted = min(MOST_RESERVED, self.num_frames // RESERVED_SHARE) - len(self._reserve)
        spare = len(self._free_frames) - self.num_frames // CLOCK_SHARE
        frames = [self._free_frames.popleft() for _ in range(min(wanted, spare))]
        self._pin([-1] * len(frames), frames)
        self._reserve.extend(frames)

    def _pin(self, pages: list[int], frames: list[int]) -> None:
        """pages: -1 for a frame that is held in reserve."""
        if pages:
            listed = self._list(pages), self._list(frames), self._list([self.round])
            pin_frames(self.tables, *listed, self.kv_heads, self.backend)

    def _list(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self.device)

    # What PagedKV does with pages where they lie.

    def make_means(self, pages: np.ndarray, slots: Tensor, pool: GroupMeanPool) -> None:
        frames = self.frame_of[pages]
        in_frames = bool((frames >= 0).all())
        if in_frames and not self.kept_layers:
            super().make_means(frames, slots, pool)
            return
        for layer in self.kept_layers:
            self._make_layer_means(layer, self.k_pages[layer], self.v_pages[layer], pages, slots, pool)
        if in_frames:
            for layer in self.tiered_layers:
                self._make_layer_means(layer, self.k_pages[layer], self.v_pages[layer], frames, slots, pool)
            return
        at_once = max(1, self.staged_pages // pages.shape[1])
        for first in range(0, len(pages), at_once):
            part = pages[first : first + at_once]
            self._make_means_apart(part, slots[first : first + at_once], pool)

    def _make_means_apart(self, pages: np.ndarray, slots: Tensor, pool: GroupMeanPool) -> None:
        """Layer by layer, from pages that are brought together."""
        self.await_prefetches()
        places = np.arange(pages.size).reshape(pages.shape)
        wanted = self.rows_of(pages.reshape(-1))
        cold, from_peer = torch.zeros(2, dtype=torch.int64, device=self.device)
        for row, layer in enumerate(self.tiered_layers):
            if self.peer_pages:
                from_peer += self.from_peer(wanted, self.slots_of(row, wanted))
            cold += self.bring(row, 0, wanted)
            self._make_layer_means(layer, self.k_staged[0], self.v_staged[0], places, slots, pool)
        self.counters.staged_pages += int(cold)
        self.counters.pages_from_peer += int(from_peer)

    def _make_layer_means(
        self,
        layer: int,
        k_pages: Tensor,
        v_pages: Tensor,
        pages: np.ndarray,
        slots: Tensor,
        pool: GroupMeanPool,
    ) -> None:
        make_group_means(
            [k_pages],
            [v_pages],
            torch.from_numpy(pages.astype(np.int64)).to(self.device),
            slots,
            pool.k[layer : layer + 1],
            pool.v[layer : layer + 1],
            pool.k_variance[layer : layer + 1],
            default_backend(self.device),
        )

    def rows_of(self, pages: np.ndarray) -> Tensor:
        """int32 [pages * kv_heads]: the rows of the residency tables' pages, head by head."""
        heads = np.arange(self.kv_heads)
        return torch.from_numpy((pages[:, None] * self.kv_heads + heads).reshape(-1).astype(np.int32)).to(
            self.device
        )

    # Layers that lie in tiers are counted among themselves here: `index` is a row of the residency tables.

    def bring(self, index: int, buffer: int, wanted: Tensor) -> Tensor:
        """Pages of a layer, from where they lie, to the first places of a staging buffer; [], how many from home."""
        hot = self.slots_of(index, wanted)
        self.bring_hot(index, buffer, hot)
        for segment in self.segments:
            self.bring_cold(segment, index, buffer, wanted, hot)
        return (hot < 0).sum()

    def from_peer(self, wanted: Tensor, slots: Tensor) -> Tensor:
        """[] int64, how many of the pages that are only at home have it on a neighbour GPU."""
        return ((slots < 0) & (wanted < self.peer_pages * self.kv_heads)).sum()

    def slots_of(self, index: int, wanted: Tensor) -> Tensor:
        """Where pages of a layer are on the GPU, -1 where they are only at home."""
        return self.tables.slot_of[index][wanted.long()]

    def bring_hot(self, index: int, buffer: int, slots: Tensor) -> None:
        layer = self.tiered_layers[index]
        self._bring((head_rows(self.k_pages[layer]), head_rows(self.v_pages[layer])), buffer, slots)

    def bring_cold(self, segment: Segment, index: int, buffer: int, wanted: Tensor, slots: Tensor) -> None:
        cold = wanted.masked_fill(slots >= 0, -1)
        self._bring(segment.rows(index), buffer, cold, segment.fetches.first_source)

    def _bring(
        self, sources: tuple[Tensor, Tensor], buffer: int, rows: Tensor, first_source: int | None = None
    ) -> None:
        places = torch.arange(len(rows), dtype=torch.int32, device=self.device)
        gather_blocks(
            sources,
            (head_rows(self.k_staged[buffer]), head_rows(self.v_staged[buffer])),
            rows,
            places,
            self._list([len(rows)]),
            4 * PROGRAMS,  # nothing else runs while a layer's pages are awaited
            self.backend,
            first_source,
        )

    def release(self, sequence: SequenceKV) -> None:
        """Pages that stay for their prefix are copied home like others: they do not keep their frames."""
        self._note(sequence, sequence.indexed)
        self.prefetches.forget(sequence)
        super().release(sequence)

    def fork(self, sequence: SequenceKV) -> SequenceKV:
        raise NotImplementedError("KV in tiers: sequences cannot be forked")

    def check_integrity(self) -> None:
        """Raise AssertionError unless every frame has one owner and what is at home is there, byte by byte."""
        self.pool.check_integrity()
        framed = np.flatnonzero(self.frame_of >= 0)
        owned = self.frame_of[framed].tolist()
        free = [*self._free_frames, *self._reserve]
        assert sorted(owned + free) == list(range(self.num_frames))
        assert self.spilled or not self._reserve
        assert self._away == (self._at_home & (self.frame_of < 0)).sum()
        home = np.flatnonzero(self._at_home & (self.frame_of >= 0))
        for segment in self.segments:
            here = home[(home >= segment.pages.start) & (home < segment.pages.stop)]
            places = here - segment.pages.start
            for frames, far in ((self.k_pages, segment.keys), (self.v_pages, segment.values)):
                for row, layer in enumerate(self.tiered_layers):
                    assert torch.equal(frames[layer][self.frame_of[here]].cpu(), far[row][places].cpu())
        movable = {**self._home.movable, **self._home.movable_dense}
        assert all(self._at_home[page] and self.frame_of[page] >= 0 for page in movable)
        assert not (set(movable) & set(self._home.waiting)) and not (set(movable) & set(self._home.copying))


def check_kept_layers(kv: TieredKV, dense_layers: tuple[int, ...]) -> None:
    """Raise ValueError for a sparse read that lists blocks of a layer that is kept whole."""
    if not set(kv.kept_layers) <= set(dense_layers):
        raise ValueError(
            f"layers {kv.kept_layers} stay on the GPU to be read wholly; a step reads only {dense_layers} so"
        )


def _rows(pages: Tensor) -> Tensor:
    """[pages, kv_heads * PAGE_SIZE * head_dim]"""
    return pages.flatten(1)


def head_rows(pages: Tensor) -> Tensor:
    """[pages * kv_heads, PAGE_SIZE * head_dim]"""
    return pages.flatten(0, 1).flatten(1)
