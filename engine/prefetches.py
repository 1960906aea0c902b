"""What is on its way from home for rounds to come, what must not be taken from it, and what it was good for.

Prefetches run beside the steps: one stream requests slots, another copies. Residency tables serve one stream at a time
(TieredKV.take_tables). Until a prefetch has been read, or has waited too long, no step takes its slots; as long as its
copies run, nobody does.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.paged_kv import SequenceKV
from kernels.backends import default_backend
from kernels.placed_pages import count_unread
from kernels.residency import ResidencyTables, Transfers

PATIENCE = 4  # steps that a prefetch is kept for, whoever they are of


@dataclass(eq=False)
class Prefetch:
    """One request, for one or several sequences.

    round: of the residency tables. ticket: how many prefetches there were, with this one. cold: [sequences] int32,
    blocks that were not hot and got slots. from_peer: [1] int32, pages that came from a neighbour GPU, once copied.
    copied: None where copying does not return before it is done. unread: sequences that have not been stepped since.
    steps: of anyone, since.
    """

    sequences: list[SequenceKV]
    round: int
    ticket: int
    transfers: Transfers
    cold: Tensor
    from_peer: Tensor
    copied: torch.cuda.Event | None
    unread: list[SequenceKV] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.unread = list(self.sequences)

    @property
    def is_copied(self) -> bool:
        return self.copied is None or self.copied.query()


@dataclass
class Account:
    """Of a prefetch that is over. numbers: int32, pages that it fetched, those of them that no step has read, those
    that came from a neighbour GPU, and of each sequence the blocks that were not hot; on the host once `done`."""

    sequences: list[SequenceKV]
    numbers: Tensor
    done: torch.cuda.Event | None


class Prefetches:
    """Those of one TieredKV. links: ways from home, each of which `programs` copy.

    arrived: [layers] int32 counts programs that have finished a layer, since the start, one prefetch after the other.
    """

    def __init__(self, layers: int, links: int, programs: int, device: torch.device) -> None:
        self.programs = links * programs
        self.arrived = torch.zeros(layers, dtype=torch.int32, device=device)
        self.tickets = 0
        self.block_size = 0  # tokens; a Prefetcher says
        self.outstanding: list[Prefetch] = []
        self.accounts: list[Account] = []
        # Copies go before what computes, or they would find no room on the multiprocessors. Requests do not: a kernel
        # that takes the place of a few programs of a step makes the whole step wait for these.
        self.request_stream, *self.copy_streams = (
            torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
            for priority in (0, *[-1] * links)
        )
        self.requested: torch.cuda.Event | None = None  # when the tables were last used for a prefetch
        self.copied: torch.cuda.Event | None = None  # when the last one was

    def add(self, prefetch: Prefetch) -> None:
        self.outstanding.append(prefetch)
        self.tickets = prefetch.ticket

    @property
    def are_copying(self) -> bool:
        return any(not prefetch.is_copied for prefetch in self.outstanding)

    def oldest(self, round: int) -> int:
        """The oldest round whose pages are needed, if `round` is about to run."""
        return min([round, *(prefetch.round for prefetch in self.outstanding)])

    def due(self, sequences: list[SequenceKV], shared: bool) -> int:
        """Where `arrived` must be, as an int32, for a step of these. shared: whether sequences share any pages."""
        last = 0
        for prefetch in self.outstanding:
            others = not any(one is other for one in sequences for other in prefetch.sequences)
            # Of a sequence that is gone, others may have its pages now.
            gone = any(not sequence.pages for sequence in prefetch.sequences)
            if not others or shared or gone:
                last = prefetch.ticket
        if not last:  # what is not outstanding has arrived
            last = self.tickets - len(self.outstanding)
        return (last * self.programs + 2**31) % 2**32 - 2**31

    def note_step(self, sequences: list[SequenceKV]) -> list[Prefetch]:
        """After a step of these has been launched: the prefetches that are over, which are outstanding no more."""
        for prefetch in self.outstanding:
            prefetch.steps += 1
            prefetch.unread = [one for one in prefetch.unread if not any(one is item for item in sequences)]
        over = [p for p in self.outstanding if p.is_copied and (not p.unread or p.steps >= PATIENCE)]
        self.outstanding = [p for p in self.outstanding if p not in over]
        return over

    def forget(self, sequence: SequenceKV) -> None:
        """A sequence is gone."""
        for prefetch in self.outstanding:
            prefetch.unread = [one for one in prefetch.unread if one is not sequence]

    def wait_for_copies(self) -> None:
        """Let the current stream wait for all that is on its way."""
        for prefetch in self.outstanding:
            if prefetch.copied is not None:
                torch.cuda.current_stream().wait_event(prefetch.copied)


def account_for(prefetch: Prefetch, tables: ResidencyTables) -> Tensor:
    """int32 [3 + sequences]: Account.numbers, on the tables' device. What a step has read bears a later stamp."""
    transfers = prefetch.transfers
    unread = count_unread(tables.stamps, transfers, prefetch.round, default_backend(tables.stamps.device))
    placed = transfers.counts.sum(dtype=torch.int32)[None]
    return torch.cat([placed, unread, prefetch.from_peer, prefetch.cold])
