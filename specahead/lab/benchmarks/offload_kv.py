"""KV in tiers over a backing store that was filled beforehand, fetched in step or, to compare with, on demand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.fetch import FetchPlan, count_fetches, request_listed
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.kv.tier_memory import PROGRAMS, Pages
from specahead.engine.kv.tiered import TieredKV
from specahead.kernels.kv_gather import LayerCopies, gather_blocks
from specahead.kernels.kv_scales import KVScales


@dataclass
class FetchOnDemand(FetchPlan):
    """The lists of a pass. A layer's pages are copied when the layer waits for them, on the stream that waits."""

    copies: LayerCopies | None = None

    def wait(self, index: int) -> None:
        assert self.copies is not None
        moved = self.transfers
        rows = moved.pages[index], moved.lines[index], moved.counts[index : index + 1]
        gather_blocks(self.copies.sources[index], self.copies.destinations[index], *rows, PROGRAMS, self.backend)


class FilledTieredKV(TieredKV):
    """KV in tiers over a given backing store: a memory for each layer, pinned if there is a GPU.

    Layers may share memory where contents do not matter.
    """

    on_demand = False
    """Whether pages are copied when a layer waits for them; else from the beginning of the step on."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        gpu_pages: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        store: list[Pages],
        scales: KVScales | None = None,
    ) -> None:
        """sizes: layers, KV heads, dimensions of a head. scales: as for KVCache.

        Raises ValueError for a store of other sizes.
        """
        self._filled = store
        super().__init__(*sizes, gpu_pages, pages, PAGE_SIZE, dtype, device, scales=scales)

    def _make_store(self, layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Pages]:
        if any(part.shape != shape for pair in self._filled for part in pair):
            raise ValueError(f"a backing store must have pages of {shape}")
        return self._filled

    def adopt_stored(self, sequence: SequenceKV) -> None:
        """Take it that the full pages of a sequence are in the backing store; they have no GPU pages yet.

        For a new sequence: `grow` it, set its length, adopt, and `begin_pass`, which then makes the offload active.
        Raises ValueError if a page has a GPU page.
        """
        self._forget_freed()
        full = sequence.table()[: sequence.length // PAGE_SIZE]
        if (self.resident.of[full] >= 0).any():
            raise ValueError("adopt_stored is for pages that no GPU page was given for")
        self._away += int((~self.store.holds[full]).sum())
        self.store.holds[full] = True

    def fetch_plan(
        self, lists: Tensor, counts: Tensor, block_size: int, page_tables: Tensor, round: Tensor
    ) -> FetchPlan | None:
        if not self.on_demand:
            return super().fetch_plan(lists, counts, block_size, page_tables, round)
        memory = self.memory
        requested = request_listed(memory, lists, counts, block_size, page_tables, round)
        return FetchOnDemand(
            **vars(requested),
            page_counts=count_fetches([requested]),
            done=counts[:0, 0, 0],
            backend=memory.backend,
            copies=memory.copies,
        )


@dataclass(frozen=True)
class Check:
    """Whether steps over KV in tiers gave the logits of steps over resident KV, bit by bit."""

    rounds: int = 0
    """Rounds that were compared."""
    same: bool | None = None
    """Whether all of them agree in every bit; None: there was nothing to compare with."""
    difference: float | None = None
    """The greatest difference of two logits; not a number where a logit is none."""

    def __str__(self) -> str:
        if self.same is None:
            return "-"
        return f"{'yes' if self.same else f'no, {self.difference:.1e}'} ({self.rounds} rounds)"


def compare_logits(got: list[Tensor | None], wanted: list[Tensor | None]) -> Check:
    """Compare the logits of each round, [batch, queries, vocab]. None: the round was void, and is passed over."""
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if a is not None and b is not None]
    if not pairs:
        return Check()
    same, difference = True, torch.zeros(())
    for one, other in pairs:
        apart = (one.float() - other.float()).abs().max()
        same = same and bool(apart.isfinite()) and torch.equal(_bits(one), _bits(other))
        difference = torch.maximum(difference, apart)  # keeps what is not a number
    return Check(len(pairs), same, float(difference))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
