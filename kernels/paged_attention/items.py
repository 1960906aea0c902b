"""What the Triton kernels of paged attention find out about an item: its tiles, queries and where its tokens lie.

An item is a (sequence, KV head, tile of queries).
"""

from specahead.kernels.backends import jit, tl
from specahead.kernels.two_terms import in_two_terms


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
def places_of(
    place,
    tokens,
    item_row,
    sources,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Return in which of [pages * kv_heads] the tokens at `place`, among all that an item reads, lie, and where there.

    item_row: sequence * KV_HEADS + the KV head. sources: block tables, lists and pieces (`Work.pieces`), and the
    strides of a table and of a list. Where an item's `tokens` end within a page, all of it is looked up, so that the
    compiler sees that a page's tokens lie side by side. Beyond, a place in the first page is returned.
    """
    tables_ptr, _lists_ptr, pieces_ptr, table_stride, list_width = sources
    UNIT: tl.constexpr = min(BLOCK, PAGE) if SPARSE else PAGE
    place = place.to(tl.uint32)
    inside = place // UNIT * UNIT < tokens.to(tl.uint32)
    if SPARSE:
        PER_PAGE: tl.constexpr = PAGE // UNIT
        piece_at = pieces_ptr + item_row * (list_width * (BLOCK // UNIT)) + place // UNIT
        piece = tl.load(piece_at, mask=inside, other=0).to(tl.int64)
        page, within = piece // PER_PAGE, piece % PER_PAGE * UNIT + (place % UNIT).to(tl.int64)
    else:
        page_at = tables_ptr + item_row // KV_HEADS * table_stride + place // PAGE
        page = tl.load(page_at, mask=inside, other=0).to(tl.int64) * KV_HEADS + item_row % KV_HEADS
        within = (place % PAGE).to(tl.int64)
    return page, within


@jit
def item_at(
    item,
    row_tiles,
    tile_starts_ptr,
    starts_ptr,
    lengths_ptr,
    lists_ptr,
    counts_ptr,
    list_width,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEWEST: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Return an item's tiles, its queries' rows, its sequence's tokens, how many tokens it reads, and where the last
    NEWEST blocks of its list end.
    """
    sequence = item // (row_tiles * KV_HEADS)
    first, stop = tl.load(tile_starts_ptr + item), tl.load(tile_starts_ptr + item + 1)
    start, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    length = tl.load(lengths_ptr + sequence)
    tokens = length
    ends = tl.arange(0, NEWEST)
    if SPARSE:
        count = tl.load(counts_ptr + item // row_tiles)
        place = count - 1 - ends
        ends = tl.load(lists_ptr + item // row_tiles * list_width + place, mask=place >= 0, other=-1) * BLOCK + BLOCK
        tokens = count * BLOCK
    return first, stop, start, end, length, tokens, ends


@jit
def queries_of(
    item,
    row_tiles,
    start,
    end,
    q_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Return which query of its sequence each row of an item is, whether there is one, and the rows."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    query = item % row_tiles * QUERIES + row // GROUP
    real = (row < QUERIES * GROUP) & (query < end - start)
    head = item // row_tiles % KV_HEADS * GROUP + row % GROUP
    at = ((start + query) * HEADS + head).to(tl.int64) * DIM
    return query, real, tl.load(q_ptr + at[:, None] + dim[None, :], mask=real[:, None], other=0.0)


@jit
def place_in_list(position, tokens, ends, BLOCK: tl.constexpr):
    """Return how many of the tokens that a list names lie before positions. tokens, ends: as `item_at` returns them."""
    behind = tl.minimum(tl.maximum(ends[None, :] - position[:, None], 0), BLOCK)
    return tokens - tl.sum(behind, 1)


@jit
def rows_in_terms(query, real, q, length, queries, tokens, ends, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Return an item's rows in two terms of 8 bits (kernels.two_terms), their unit, a power of two, and the places up
    to which they see all tokens.

    These are made before an item's loop begins and carried into it: the compiler then neither makes them anew for each
    tile nor in two layouts. The other arguments are as `queries_of` and `item_at` return them.
    """
    q = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(tl.abs(q), 1), 0), 1e-30)
    unit = tl.exp2(tl.ceil(tl.log2(largest)) - 8)
    limit = tl.where(real, place_in_list(length - queries + query + 1, tokens, ends, BLOCK), 0)
    return in_two_terms(q / unit, dtype), unit, limit
