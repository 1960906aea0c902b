"""What the Triton kernels of paged attention find out about an item: its tiles, queries and where its tokens lie.

An item is a (sequence, KV head, tile of queries).
"""

from typing import Any, NamedTuple

from specahead.kernels.backends import jit, tl


class Cut(NamedTuple):
    """What the attention kernel is compiled for."""

    HEADS: int  # query heads
    KV_HEADS: int
    QUERIES: int  # of a tile
    KEPT: int  # rows of an item: a row is a query of one head
    ROWS: int  # the same, as the power of two that products take
    DIM: int  # of a head
    PAGE: int  # tokens of a page
    BLOCK: int  # tokens of a listed block, or of one whose weights are emitted
    NEWEST: int  # last blocks of a list, after which no query of a sequence stands
    TILE: int  # tokens of a tile of keys
    GROUP_TILE: int  # group means that are taken at once
    MIN_TILES: int  # of a program
    STAGES: int  # tiles in flight
    EIGHT: bool  # pages have 8-bit numbers, values with the tokens of a dimension side by side
    SPARSE: bool  # lists are read
    MEANS: bool  # group means stand in for what lists leave out
    EMIT: bool  # weights of blocks are emitted
    SPREAD: bool  # the tokens of a tile are in the order of `blocks_by_warp`
    BRANCHED: bool  # queries are on branches of their sequence
    MAX_VARIANCE: float  # `GroupMeans.variance_limit`
    PRECISION: str  # of products
    COLUMNS: int  # if not 0, `attend_in_columns` attends, with this many columns and MORE
    MORE: int
    APART: int  # programs of each item that attend to its group means alone


class Sources(NamedTuple):
    """Where an item's tokens lie: block tables, lists, `Work.pieces`, and the strides of a table and of a list."""

    tables: Any
    lists: Any
    pieces: Any
    table_stride: Any
    list_width: Any


class Items(NamedTuple):
    """What `facts_of` reads: tiles of queries of a sequence, `Work.tile_starts`, the batch, and the lists' counts."""

    row_tiles: Any
    tile_starts: Any
    starts: Any
    lengths: Any
    counts: Any


class Item(NamedTuple):
    """An item: its number among all, and its first tile and the one after its last, among the tiles of all items.

    row_tiles: tiles of queries of its sequence. row: sequence * KV_HEADS + the KV head. start, end: of its sequence's
    queries. length: of its sequence. tokens: how many it reads. ends: where the NEWEST last blocks of its list end.
    """

    number: Any
    row_tiles: Any
    row: Any
    first: Any
    stop: Any
    start: Any
    end: Any
    length: Any
    tokens: Any
    ends: Any


@jit
def first_tile(program, total, programs, MIN_TILES: tl.constexpr):
    """Return where a program's stretch of all tiles begins. Shares are equal, and of at least MIN_TILES if possible."""
    programs = tl.minimum(programs, tl.cdiv(total, MIN_TILES))
    share = total // tl.maximum(programs, 1)
    return tl.minimum(program * share + tl.minimum(program, total - share * programs), total)


@jit
def program_of(tile, total, programs, MIN_TILES: tl.constexpr):
    """Return the program whose stretch holds a tile: the reverse of `first_tile`."""
    programs = tl.minimum(programs, tl.cdiv(total, MIN_TILES))
    share = total // tl.maximum(programs, 1)
    longer = total - share * programs  # as many programs have a tile more
    if tile < longer * (share + 1):
        program = tile // (share + 1)
    else:
        program = longer + (tile - longer * (share + 1)) // tl.maximum(share, 1)
    return program


@jit
def programs_of(item, items, tile_starts_ptr, programs, MIN_TILES: tl.constexpr):
    """Return the first program that has tiles of an item, and the one after the last."""
    total = tl.load(tile_starts_ptr + items)
    begin, end = tl.load(tile_starts_ptr + item), tl.load(tile_starts_ptr + item + 1)
    first = program_of(begin, total, programs, MIN_TILES)
    return first, tl.where(end > begin, program_of(end - 1, total, programs, MIN_TILES) + 1, first)


@jit
def facts_of(number, items, sources, CUT: tl.constexpr):
    """Load what has to be known of an item, the fields of `Item` from `first` on. items: `Items`."""
    sequence = number // (items.row_tiles * CUT.KV_HEADS)
    first, stop = tl.load(items.tile_starts + number), tl.load(items.tile_starts + number + 1)
    start, end = tl.load(items.starts + sequence), tl.load(items.starts + sequence + 1)
    length = tl.load(items.lengths + sequence)
    tokens, ends = length, tl.arange(0, CUT.NEWEST)
    if CUT.SPARSE:
        count, at = tl.load(items.counts + number // items.row_tiles), number // items.row_tiles * sources.list_width
        place = count - 1 - ends
        ends = tl.load(sources.lists + at + place, mask=place >= 0, other=-1) * CUT.BLOCK + CUT.BLOCK
        tokens = count * CUT.BLOCK
    return first, stop, start, end, length, tokens, ends


@jit
def item_of(number, items, facts):
    """Return the item of a number with its facts."""
    return Item(number, items.row_tiles, number // items.row_tiles, *facts)


@jit
def places_of(place, item, sources, CUT: tl.constexpr):
    """Return in which of [pages * kv_heads] the tokens at `place`, among all that an item reads, lie, and where there.

    Where an item's tokens end within a page, all of it is looked up, so that the compiler sees that a page's tokens lie
    side by side. Beyond, a place in the first page is returned.
    """
    UNIT: tl.constexpr = min(CUT.BLOCK, CUT.PAGE) if CUT.SPARSE else CUT.PAGE
    place = place.to(tl.uint32)
    inside = place // UNIT * UNIT < item.tokens.to(tl.uint32)
    if CUT.SPARSE:
        PER_PAGE: tl.constexpr = CUT.PAGE // UNIT
        piece_at = sources.pieces + item.row * (sources.list_width * (CUT.BLOCK // UNIT)) + place // UNIT
        piece = tl.load(piece_at, mask=inside, other=0).to(tl.int64)
        page, within = piece // PER_PAGE, piece % PER_PAGE * UNIT + (place % UNIT).to(tl.int64)
    else:
        page_at = sources.tables + item.row // CUT.KV_HEADS * sources.table_stride + place // CUT.PAGE
        page = tl.load(page_at, mask=inside, other=0).to(tl.int64) * CUT.KV_HEADS + item.row % CUT.KV_HEADS
        within = (place % CUT.PAGE).to(tl.int64)
    return page, within


@jit
def queries_of(item, q_ptr, CUT: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr = 0):
    """Return which query of its sequence each of ROWS rows of an item is, from row FIRST on, whether there is one, and
    the rows.
    """
    GROUP: tl.constexpr = CUT.HEADS // CUT.KV_HEADS
    row, dim = FIRST + tl.arange(0, ROWS), tl.arange(0, CUT.DIM)
    query = item.number % item.row_tiles * CUT.QUERIES + row // GROUP
    real = (row < CUT.KEPT) & (query < item.end - item.start)
    head = item.number // item.row_tiles % CUT.KV_HEADS * GROUP + row % GROUP
    at = ((item.start + query) * CUT.HEADS + head).to(tl.int64) * CUT.DIM
    return query, real, tl.load(q_ptr + at[:, None] + dim[None, :], mask=real[:, None], other=0.0)


@jit
def place_in_list(position, item, CUT: tl.constexpr):
    """Return how many of the tokens that an item's list names lie before positions."""
    behind = tl.minimum(tl.maximum(item.ends[None, :] - position[:, None], 0), CUT.BLOCK)
    return item.tokens - tl.sum(behind, 1)


@jit
def seen_by(query, real, item, visible_ptr, CUT: tl.constexpr):
    """Return up to which position each row sees all tokens, and the first and the end of those it sees of its branch.

    Without branches these are places among the tokens that the item reads. query, real: as `queries_of` returns them.
    """
    if CUT.BRANCHED:
        visible_at = visible_ptr + (item.start + query) * 3
        limit = tl.load(visible_at, mask=real, other=0)
        own_first = tl.load(visible_at + 1, mask=real, other=0)
        own_last = tl.load(visible_at + 2, mask=real, other=0)
    else:
        limit = tl.where(real, item.length - (item.end - item.start) + query + 1, 0)  # a row sees what is before it
        if CUT.SPARSE:
            # Lists ascend: by the last few blocks it is known up to which place in the list a row sees all tokens.
            limit = tl.where(real, place_in_list(limit, item, CUT), 0)
        own_first, own_last = limit, limit
    return limit, own_first, own_last


@jit
def position_of(place, item, sources, CUT: tl.constexpr):
    """Return the numbers by which the tokens at `place` are compared with those of `seen_by`.

    They are positions if queries branch, and else places. The arguments are as for `places_of`.
    """
    if CUT.SPARSE and CUT.BRANCHED:
        # Where a token lies and which it is are two loads side by side: neither waits for the other.
        at = sources.lists + item.row * sources.list_width + place // CUT.BLOCK
        block = tl.load(at, mask=place < item.tokens, other=0)
        place = tl.where(place < item.tokens, block * CUT.BLOCK + place % CUT.BLOCK, item.length)
    return place
