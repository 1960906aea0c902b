"""What the Triton kernels of paged attention find out about an item: its tiles, queries and where its tokens lie.

An item is a (sequence, KV head, tile of queries).
"""

from specahead.kernels.backends import jit, tl


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
    FIRST: tl.constexpr = 0,
):
    """Return which query of its sequence each of ROWS rows of an item is, from row FIRST on, whether there is one, and
    the rows.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, dim = FIRST + tl.arange(0, ROWS), tl.arange(0, DIM)
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
def seen_by(
    query,
    real,
    start,
    length,
    queries,
    tokens,
    ends,
    visible_ptr,
    BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    """Return up to which position each row sees all tokens, and the first and the end of those it sees of its branch.

    Without branches these are places among the tokens that the item reads. queries: of the sequence. query, real and
    the others: as `queries_of` and `item_at` return them.
    """
    if BRANCHED:
        visible_at = visible_ptr + (start + query) * 3
        limit = tl.load(visible_at, mask=real, other=0)
        own_first = tl.load(visible_at + 1, mask=real, other=0)
        own_last = tl.load(visible_at + 2, mask=real, other=0)
    else:
        limit = tl.where(real, length - queries + query + 1, 0)  # a row sees what is before it
        if SPARSE:
            # Lists ascend: by the last few blocks it is known up to which place in the list a row sees all tokens.
            limit = tl.where(real, place_in_list(limit, tokens, ends, BLOCK), 0)
        own_first, own_last = limit, limit
    return limit, own_first, own_last


@jit
def position_of(
    place, tokens, length, item_row, sources, BLOCK: tl.constexpr, SPARSE: tl.constexpr, BRANCHED: tl.constexpr
):
    """Return the numbers by which the tokens at `place` are compared with those of `seen_by`.

    They are positions if queries branch, and else places. The arguments are as for `places_of`.
    """
    _tables_ptr, lists_ptr, _pieces_ptr, _table_stride, list_width = sources
    if SPARSE and BRANCHED:
        # Where a token lies and which it is are two loads side by side: neither waits for the other.
        block = tl.load(lists_ptr + item_row * list_width + place // BLOCK, mask=place < tokens, other=0)
        place = tl.where(place < tokens, block * BLOCK + place % BLOCK, length)
    return place
