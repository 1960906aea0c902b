"""Requests: the blocks that a step lists are in cache lines afterwards, as far as there are lines."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.residency.request_kernels import launch_request
from specahead.kernels.residency.tables import (
    ListedBlocks,
    ResidencyTables,
    Transfers,
    empty_transfers,
    pages_of_blocks,
)


def request_blocks(
    tables: ResidencyTables, listed: ListedBlocks, round: Tensor, backend: Backend = "torch"
) -> Transfers:
    """Give the pages of listed blocks lines for `round`, as far as there are lines; return the copies that this takes.

    round: [1] int32, not below that of any call before. The lines that it needs are no victims.

    Hits get stamp and bit, before any victim is chosen. Misses are placed in the order of sequences, heads and lists:
    first wanted, first placed. A page that finds no line overflows: it is counted once, and stays in the backing store.
    All misses must be in the backing store: pages that were never written are "copied" too.
    """
    if backend == "triton":
        return launch_request(tables, listed, round)
    pages = pages_of_blocks(tables.pages, listed).flatten(1)
    transfers = empty_transfers(tables.rows, pages.shape[1], pages.device)
    for row in range(tables.rows):
        _request_row(tables, row, pages[row][pages[row] >= 0], int(round), transfers)
    return transfers


def _request_row(tables: ResidencyTables, row: int, wanted: Tensor, now: int, transfers: Transfers) -> None:
    """One row of the reference; wanted: [n] int32, pages in order."""
    pages = list(dict.fromkeys(wanted.tolist()))
    lines = [int(tables.line_of[row, page]) for page in pages]
    for line in lines:
        if line >= 0:
            tables.referenced[row, line] = 1
            tables.stamps[row, line] = now
    missing = [page for page, line in zip(pages, lines, strict=True) if line < 0]
    victims = _advance_hand(tables, row, len(missing), now)
    for i, (page, line) in enumerate(zip(missing, victims, strict=False)):
        old = int(tables.page_in[row, line])
        if old >= 0:
            tables.line_of[row, old] = -1
        tables.line_of[row, page] = line
        tables.page_in[row, line] = page
        tables.stamps[row, line] = now
        transfers.lines[row, i] = line
    transfers.pages[row, : len(missing)] = torch.tensor(missing, dtype=torch.int32)
    transfers.counts[row] = len(victims)
    transfers.overflow[row] = len(missing) - len(victims)


def _advance_hand(tables: ResidencyTables, row: int, wanted: int, now: int) -> list[int]:
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
