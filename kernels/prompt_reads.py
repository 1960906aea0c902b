"""What passes over prompts read of paged KV: each sequence piece by piece, the ends of short parts together.

Every piece takes the host 150 to 200 us to launch in each layer. So one launch of FlashAttention reads the ends of
short parts of all sequences (ragged_attention.py), and to most of them at most one piece before the end is left.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specahead.kernels.backends import send
from specahead.kernels.ragged_attention import Ragged

PIECE = 65536  # tokens whose keys are copied at once, at most
STEP = 4096  # tokens; what longer pieces are a multiple of
UNIT = 512  # tokens; what all pieces are a multiple of
SHORT = 2048  # new tokens of a part whose end is read together with those of other parts, at most
NEAR = 12288  # tokens before a short part that are read with its end, at most
# Products of queries, keys, heads and dimensions before a short part that are worth a piece: with fewer FlashAttention
# takes less time beyond that of cuDNN than the piece takes the host.
WORTH_A_PIECE = 1.5e10
REST = 2048  # tokens of a further piece before a short part, where more than these are left before its end
WORTH_THE_REST = 1e10  # products that are worth it: passes over so many tokens keep the device busy, not the host


@dataclass(frozen=True)
class PromptPart:
    """The reads of one sequence's new tokens: of its own piece, and of the pieces before it.

    Places of a piece are int64 [kv_heads * pages of the piece]: rows of the pages taken as [pages * kv_heads,
    page_size * head_dim].
    """

    rows: slice  # the queries of the new tokens in the pass
    skipped: int  # tokens of the own piece before the first new one
    size: int  # tokens of the own piece, filling included; of a short part the number of queries, filling included
    before: list[Tensor]  # places of the pieces before it
    own: Tensor | None  # places of the own piece; None: the end is read with those of other parts


@dataclass(frozen=True)
class Ends:
    """The reads of the ends of short parts that follow one another, in one launch."""

    parts: list[PromptPart]
    places: Tensor  # of the keys of all parts
    ragged: Ragged

    @property
    def rows(self) -> slice:
        """The queries of all parts in the pass."""
        return slice(self.parts[0].rows.start, self.parts[-1].rows.stop)


@dataclass(frozen=True)
class PromptReads:
    """The reads of a pass over prompts."""

    parts: list[PromptPart | Ends]  # in the order of their rows
    room: Tensor  # [2, elements], where keys and values are copied to, in every layer
    cudnn: bool  # whether cuDNN and FlashAttention attend; else torch does


def make_room(tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for the pieces of sequences of up to `tokens` tokens.

    It is made once: otherwise larger rooms would be allocated one by one as prompts grow.
    """
    return torch.empty(2, min(PIECE, size_of_own(tokens)) * kv_heads * dim, dtype=dtype, device=device)


def plan_prompts(
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Tensor,
    heads: tuple[int, int, int],
    page_size: int,
    room: Tensor,
    cudnn: bool,
) -> PromptReads:
    """Return the reads of each sequence with queries, which are its last tokens, made once for all layers of a pass.

    starts: the first query row of each sequence, and where the last one ends. lengths: tokens of each with KV, the
    queries' own included. tables: [sequences, max_pages] int32, on the device. heads: numbers of query heads and KV
    heads, and their dimensions. room: as `make_room` gives it for the longest sequence.
    Raises ValueError for more queries of a sequence than a piece may have.
    """
    planner = _Planner(tables, heads, page_size, room.shape[1] // (heads[1] * heads[2]))
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        if rows.start < rows.stop:
            planner.add(i, rows, length)
    planner.join_ends()
    return PromptReads(planner.parts, room, cudnn)


@dataclass
class _Planner:
    """Collects the parts of a pass."""

    tables: Tensor
    heads: tuple[int, int, int]
    page_size: int
    most: int  # tokens that there is room for
    parts: list[PromptPart | Ends] = field(default_factory=list)
    short: list[PromptPart] = field(default_factory=list)  # short parts that are not joined yet
    own: list[Tensor] = field(default_factory=list)  # the pages of each one's end
    used: list[int] = field(default_factory=list)  # tokens of each one's end

    def add(self, sequence: int, rows: slice, length: int) -> None:
        """Add the part of a sequence; tokens before its own piece or end are read by pieces."""
        new, table = rows.stop - rows.start, self.tables[sequence]
        base = length - new
        short = new <= SHORT
        first = base // STEP * STEP if short else base - base % UNIT
        if short and base <= NEAR and new * base * self.heads[0] * self.heads[2] < WORTH_A_PIECE:
            first = 0
        elif short and base - first >= REST and new * REST * self.heads[0] * self.heads[2] >= WORTH_THE_REST:
            first += REST
        pieces = [self._places(table[a // self.page_size : b // self.page_size]) for a, b in pieces_before(first)]
        if short:
            if sum(map(len, self.own)) * self.page_size + length - first + self.page_size > self.most:
                self.join_ends()
            self.short.append(PromptPart(rows, 0, queries_of_short(new), pieces, None))
            self.own.append(table[first // self.page_size : -(-length // self.page_size)])
            self.used.append(length - first)
            return
        self.join_ends()
        size = size_of_own(length - first)
        if size > PIECE:
            raise ValueError(f"{new} tokens of a prompt in one pass, at most {PIECE}: lower prefill_chunk")
        # Pages that fill the own piece up come after every query, which gives them no weight: any page will do.
        held = torch.arange(first // self.page_size, (first + size) // self.page_size, device=table.device)
        own = table.index_select(0, held.clamp(max=(length - 1) // self.page_size))
        self.parts.append(PromptPart(rows, base - first, size, pieces, self._places(own)))

    def join_ends(self) -> None:
        """Have the ends of the short parts since the last call read in one launch."""
        if not self.short:
            return
        queries = [part.rows.stop - part.rows.start for part in self.short]
        keys = [len(pages) * self.page_size for pages in self.own]
        numbers = [0, *itertools.accumulate(queries)], [0, *itertools.accumulate(keys)], [*self.used, 0]
        starts, key_starts, used = send(torch.tensor(numbers, dtype=torch.int32), self.tables.device)
        ragged = Ragged(starts, key_starts, used[:-1], max(queries), max(keys))
        self.parts.append(Ends(self.short, self._places(torch.cat(self.own)), ragged))
        self.short, self.own, self.used = [], [], []

    def _places(self, pages: Tensor) -> Tensor:
        heads = torch.arange(self.heads[1], device=pages.device)[:, None]
        return (pages.long()[None] * self.heads[1] + heads).flatten()


def pieces_before(length: int) -> Iterator[tuple[int, int]]:
    """Cut the first `length` tokens, a multiple of UNIT, into pieces of few sizes."""
    start = 0
    while start < length:
        left = length - start
        size = min(PIECE, left // STEP * STEP) or 1 << (left.bit_length() - 1)
        yield start, start + size
        start += size


def size_of_own(tokens: int) -> int:
    """Return the size of the piece for `tokens` new tokens: one or one and a half times a power of two."""
    size = UNIT
    while size < tokens:
        if size * 3 // 2 >= tokens and size > UNIT:
            return size * 3 // 2
        size *= 2
    return size


def queries_of_short(tokens: int) -> int:
    """Return with how many queries pieces before a short part of `tokens` new tokens are attended to, filling included.

    In finer steps than longer parts have, since filling takes cuDNN as long as queries.
    """
    return size_of_own(tokens) if tokens <= SHORT // 2 else -(-tokens // (SHORT // 8)) * (SHORT // 8)


def shapes_of_parts(most: int) -> Iterator[tuple[int, int]]:
    """Yield all numbers of queries that pieces are attended to with, for up to `most` new tokens at once, each with all
    sizes of such a piece, 0 for the own one: the largest first. Short parts have no pieces but before their ends.
    """
    short = {queries_of_short(tokens) for tokens in range(1, min(SHORT, most) + 1)}
    long = {size_of_own(tokens) for tokens in range(SHORT + 1, size_of_own(most) + 1, UNIT)}
    before = sorted({b - a for tokens in range(0, PIECE + 1, UNIT) for a, b in pieces_before(tokens)})
    for size in sorted(short | long, reverse=True):
        yield from (
            (size, piece) for piece in (0, *before) if size in long or (piece and (piece == REST or piece % STEP == 0))
        )
