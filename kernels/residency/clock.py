"""The eviction clock: which cache lines the hand takes, in torch and for kernels."""

from kernels.backends import jit, tl
from kernels.residency.tables import ResidencyTables


def advance_hand(tables: ResidencyTables, row: int, wanted: int, now: int) -> list[int]:
    """Up to `wanted` victims, in the order in which the hand finds them; moves the hand and clears bits."""
    if not wanted:
        return []
    stamps, dirty, bits = (t[row].tolist() for t in (tables.stamps, tables.dirty, tables.referenced))
    hand = int(tables.hand[row])
    victims: dict[int, None] = {}  # in order; the second sweep finds them again, which changes nothing
    for _ in range(2 * tables.lines):
        if len(victims) == wanted:
            break
        if stamps[hand] < now and not dirty[hand]:
            if bits[hand]:
                bits[hand] = 0
            else:
                victims[hand] = None
        hand = (hand + 1) % tables.lines
    tables.referenced[row] = tables.referenced.new_tensor(bits)
    tables.hand[row] = hand
    return list(victims)


@jit
def loose_lines(round_ptr, begun_ptr, referenced_ptr, stamps_ptr, dirty_ptr, row, chunk, lines, CHUNK: tl.constexpr):
    """The lines of a chunk in the order of the hand, and what it may take: at once, and if it comes again."""
    now = tl.load(round_ptr)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    there = place < lines
    line = tl.load(begun_ptr + row) + place
    line = tl.where(line >= lines, line - lines, line)
    stamp = tl.load(stamps_ptr + row * lines + line, mask=there, other=0)
    unsaved = tl.load(dirty_ptr + row * lines + line, mask=there, other=1)
    bit = tl.load(referenced_ptr + row * lines + line, mask=there, other=0)
    loose = there & (stamp < now) & (unsaved == 0)
    return line, (loose & (bit == 0)).to(tl.int32), (loose & (bit != 0)).to(tl.int32)
