"""KV in tiers: all pages have a home in host memory, and as many as fit lie on the GPU.

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
"""

import os
from collections import deque
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from engine.host_memory import host_zeros
from engine.paged_kv import PAGE_SIZE, GroupMeanPool, OutOfPages, PagedKV, PagePool, SequenceKV, pages_for
from kernels.backends import default_backend
from kernels.group_means import make_group_means
from kernels.kv_gather import gather_blocks, layer_copies
from kernels.residency import clear_tables, drop_pages, empty_tables, mark_home, pin_frames

COPIED_AT_ONCE = 64  # full pages that are waited for before they are copied home, unless frames are short
CLOCK_SHARE = (
    4  # once KV has spilled, at least 1 / CLOCK_SHARE of the frames is left to the clock, where that can be
)
# That fetch: enough for the host's link (docs/performance.md). Attention has room for no more beside it
# (kernels.paged_attention.LEFT_FREE).
PROGRAMS = 8


@dataclass
class TierCounters:
    """Pages are of one layer and KV head; of those copied home, whole pages.

    hit: listed by a step, and in a slot already. fetched: into slots, for a step that listed them. refused: had no
    slot, so that the step ran again. staged: brought from home for a pass that reads everything; stages: such passes.
    """

    hit_pages: int = 0
    fetched_pages: int = 0
    refused_pages: int = 0
    staged_pages: int = 0
    stages: int = 0
    copied_home: int = 0
    spills: int = 0

    def values(self, page_bytes: int, heads: int) -> dict[str, float]:
        """By name; page_bytes: keys and values of a page of one layer and head. heads: of all layers."""
        counts = {item.name: float(getattr(self, item.name)) for item in fields(self)}
        counts["bytes_fetched"] = page_bytes * (self.fetched_pages + self.staged_pages)
        counts["bytes_copied_home"] = page_bytes * heads * self.copied_home
        return counts


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


class TieredKV(PagedKV):
    """A PagedKV whose page numbers are places at home. A runner calls `begin` before each pass.

    frames: pages that lie on the GPU at once; pages: at home, in all. longest: tokens of a sequence, at most, which
    StagedReads has room for.
    kept_layers: whose pages all stay on the GPU, at their numbers. tables: rows are the other layers, a page of them is
    page * kv_heads + head, a slot frame * kv_heads + head; they say nothing until KV has spilled.
    k_home, v_home: of each layer in tiers, all pages on the host, [pages, kv_heads, PAGE_SIZE, head_dim].
    home: k_home and v_home, if they are there already (for a GPU pinned; layers may share one if contents do not
    matter). fetches: from home into the slots of all layers. Raises MemoryError if the host has no room.
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
        kept_layers: tuple[int, ...] = (),
        home: Pages | None = None,
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
        for layer in kept_layers:
            self.k_pages[layer], self.v_pages[layer] = (
                torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2)
            )
        if home is not None and any(part.shape != shape for part in (*home[0], *home[1])):
            raise ValueError(f"pages at home that are there already must be {shape}")
        self.k_home, self.v_home = home or self._make_home(shape, dtype)
        self._freed: list[int] = []
        self._last_work: list[SequenceKV] = []
        self.pool = PagePool(pages, self._freed)
        self.num_frames = frames
        self.frame_of = np.full(pages, -1, np.int32)
        self._at_home = np.zeros(pages, bool)
        self._away = 0  # pages that are at home and in no frame
        self._free_frames = deque(range(frames))
        self._home = _HomeState()
        self._home_stream, self.link_stream = (
            # Before what computes, or it would find no room on the multiprocessors.
            torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
            for _ in range(2)
        )
        self.fetches = layer_copies(
            [self.home_rows(index) for index in range(len(self.tiered_layers))],
            [(head_rows(self.k_pages[i]), head_rows(self.v_pages[i])) for i in self.tiered_layers],
            self.device,
        )
        rows = max(1, len(self.tiered_layers))
        self.tables = empty_tables(rows, pages * kv_heads, frames * kv_heads, self.device)
        self.spilled = False
        self.round = 0  # of the residency tables
        staged = (2, pages_for(longest), kv_heads, PAGE_SIZE, head_dim)
        self.k_staged, self.v_staged = (
            torch.zeros(staged, dtype=dtype, device=self.device) for _ in range(2)
        )
        self.counters = TierCounters()

    def _make_home(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = ([host_zeros(shape, dtype, self.device) for _ in self.tiered_layers] for _ in range(2))
        return keys, values

    @property
    def backend(self) -> str:
        return default_backend(self.device)

    @property
    def staged_pages(self) -> int:
        """That StagedReads has room for."""
        return self.k_staged.shape[1]

    @property
    def totals(self) -> dict[str, float]:
        """Counters since the start, by name."""
        page_bytes = 2 * self.k_pages[0][0, 0].nbytes
        values = self.counters.values(page_bytes, len(self.tiered_layers) * self.kv_heads)
        return {f"kv_{name}": value for name, value in values.items()}

    @property
    def gauges(self) -> dict[str, float]:
        return {
            "kv_frames": self.num_frames,
            "kv_frames_written": self.num_frames - len(self._free_frames),  # the clock has the others
            "kv_spilled": float(self.spilled),
        }

    def frames(self, sequence: SequenceKV) -> np.ndarray:
        """int32 [pages], the frame of each page, -1 where it has none."""
        return self.frame_of[sequence.table()]

    is_tiered = True

    def can_fetch(self, width: int, dense_layers: tuple[int, ...], block_size: int) -> bool:
        """Whether a pass lists all that it reads of the layers in tiers, in whole pages."""
        return width > 0 and dense_layers == self.kept_layers and block_size % PAGE_SIZE == 0

    def check_dense_layers(self, dense_layers: tuple[int, ...]) -> None:
        """Raise ValueError for a sparse read that lists blocks of a layer that is kept whole."""
        if not set(self.kept_layers) <= set(dense_layers):
            raise ValueError(
                f"layers {self.kept_layers} stay on the GPU to be read wholly; a step reads only {dense_layers} so"
            )

    def is_resident(self, sequence: SequenceKV) -> bool:
        """Whether all pages are in frames, so that block tables can name these."""
        return not self._away or self._is_framed(sequence.table())

    def _is_framed(self, pages: np.ndarray) -> bool:
        # The first page is the first to leave.
        return not len(pages) or bool(self.frame_of[pages[0]] >= 0 and (self.frame_of[pages] >= 0).all())

    def next_round(self) -> int:
        self.round += 1
        return self.round

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
        if not self.spilled and (reaches_home or len(fresh) > len(self._free_frames)):
            self._spill()
        if self.spilled:
            self._leave_to_clock(len(fresh))
        if len(fresh) > len(self._free_frames):
            for sequence, _ in work:
                self.truncate(sequence, sequence.length)
            raise OutOfPages(
                f"{len(fresh)} frames wanted, {len(self._free_frames)} of {self.num_frames} can be given: "
                "raise --kv-memory, or lower --max-sessions or --prefill-chunk"
            )
        self._give_frames(fresh)

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
            self.spilled = False

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
        copied = self._list(self.frame_of[pages].tolist()), self._list(pages), self._list([len(pages)])
        done: torch.cuda.Event | None = None
        if self._home_stream is None:
            self._copy_layers_home(*copied)
        else:
            self._home_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._home_stream):
                self._copy_layers_home(*copied)
                done = torch.cuda.Event()
                done.record()
            for tensor in copied:
                tensor.record_stream(self._home_stream)
        self._home.copies.append(_Copy(pages, done))
        self.counters.copied_home += len(pages)

    def _copy_layers_home(self, frames: Tensor, pages: Tensor, count: Tensor) -> None:
        for row, layer in enumerate(self.tiered_layers):
            gather_blocks(
                (_rows(self.k_pages[layer]), _rows(self.v_pages[layer])),
                (_rows(self.k_home[row]), _rows(self.v_home[row])),
                frames,
                pages,
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
        if len(self._free_frames) + len(leaving) < floor and (home.waiting or home.copying):
            self._copy_home()
            self._take_up_copies(wait=True)
            leaving += home.movable
            home.movable.clear()
        while len(self._free_frames) + len(leaving) < floor and home.movable_dense:
            leaving.append(next(iter(home.movable_dense)))
            del home.movable_dense[leaving[-1]]
        if not leaving:
            return
        mark_home(self.tables, self._list(leaving), self.kv_heads, self.backend)
        self._free_frames.extend(self.frame_of[leaving].tolist())
        self.frame_of[leaving] = -1
        self._away += len(leaving)

    def _give_frames(self, pages: list[int]) -> None:
        """From the clock's frames."""
        for page in pages:
            self.frame_of[page] = self._free_frames.popleft()
        if self.spilled:
            self._pin(pages, self.frame_of[pages].tolist())

    def _pin(self, pages: list[int], frames: list[int]) -> None:
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
        places = np.arange(pages.size).reshape(pages.shape)
        wanted = self.rows_of(pages.reshape(-1))
        cold = torch.zeros((), dtype=torch.int64, device=self.device)
        for row, layer in enumerate(self.tiered_layers):
            cold += self.bring(row, 0, wanted)
            self._make_layer_means(layer, self.k_staged[0], self.v_staged[0], places, slots, pool)
        self.counters.staged_pages += int(cold)

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
        self.bring_cold(index, buffer, wanted, hot)
        return (hot < 0).sum()

    def slots_of(self, index: int, wanted: Tensor) -> Tensor:
        """Where pages of a layer are on the GPU, -1 where they are only at home."""
        return self.tables.slot_of[index][wanted.long()]

    def bring_hot(self, index: int, buffer: int, slots: Tensor) -> None:
        layer = self.tiered_layers[index]
        self._bring((head_rows(self.k_pages[layer]), head_rows(self.v_pages[layer])), buffer, slots)

    def bring_cold(self, index: int, buffer: int, wanted: Tensor, slots: Tensor) -> None:
        self._bring(self.home_rows(index), buffer, wanted.masked_fill(slots >= 0, -1))

    def home_rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer at home, a row for each page and head."""
        return head_rows(self.k_home[index]), head_rows(self.v_home[index])

    def _bring(self, sources: tuple[Tensor, Tensor], buffer: int, rows: Tensor) -> None:
        places = torch.arange(len(rows), dtype=torch.int32, device=self.device)
        gather_blocks(
            sources,
            (head_rows(self.k_staged[buffer]), head_rows(self.v_staged[buffer])),
            rows,
            places,
            self._list([len(rows)]),
            4 * PROGRAMS,  # nothing else runs while a layer's pages are awaited
            self.backend,
        )

    def release(self, sequence: SequenceKV) -> None:
        """Pages that stay for their prefix are copied home like others: they do not keep their frames."""
        self._note(sequence, sequence.indexed)
        super().release(sequence)

    def fork(self, sequence: SequenceKV) -> SequenceKV:
        raise NotImplementedError("KV in tiers: sequences cannot be forked")

    def check_integrity(self) -> None:
        """Raise AssertionError unless every frame has one owner and what is at home is there, byte by byte."""
        self.pool.check_integrity()
        framed = np.flatnonzero(self.frame_of >= 0)
        owned = self.frame_of[framed].tolist()
        assert sorted(owned + list(self._free_frames)) == list(range(self.num_frames))
        assert self._away == (self._at_home & (self.frame_of < 0)).sum()
        home = np.flatnonzero(self._at_home & (self.frame_of >= 0))
        for frames, far in ((self.k_pages, self.k_home), (self.v_pages, self.v_home)):
            for row, layer in enumerate(self.tiered_layers):
                assert torch.equal(frames[layer][self.frame_of[home]].cpu(), far[row][home])
        movable = {**self._home.movable, **self._home.movable_dense}
        assert all(self._at_home[page] and self.frame_of[page] >= 0 for page in movable)
        assert not (set(movable) & set(self._home.waiting)) and not (set(movable) & set(self._home.copying))


def _rows(pages: Tensor) -> Tensor:
    """[pages, kv_heads * PAGE_SIZE * head_dim]"""
    return pages.flatten(1)


def head_rows(pages: Tensor) -> Tensor:
    """[pages * kv_heads, PAGE_SIZE * head_dim]"""
    return pages.flatten(0, 1).flatten(1)
