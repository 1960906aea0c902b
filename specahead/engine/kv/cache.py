"""The KV of a model in pages on its device.

`TieredKV` (engine.kv.tiered) has a backing store in host memory, and only some of the pages on the GPU. Both classes
have the same methods, so that runners and services need not know which one they use. The order of a pass:

    begin_pass        allocates pages for the new tokens, and GPU pages to write them to
    gpu_pages         says where a sequence's pages lie in `k_pages` and `v_pages`, if it is resident
    can_fetch         otherwise says whether a step fetches the pages that it lists (fetch_plan); if not, sequences are
                      brought together (stage)
    count_step        after a step that fetched: counts, and says whether everything found room
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.fetch import ChosenFetcher, FetchPlan, LastChoices
from specahead.engine.kv.group_means import GroupMeanPool, make_means
from specahead.engine.kv.pages import PAGE_SIZE, LastChoice, OutOfPages, SequenceKV, kv_zeros, pages_for
from specahead.engine.kv.pool import PagePool
from specahead.engine.kv.prefix_index import blocks_of
from specahead.engine.kv.staged import StagedReads
from specahead.engine.parallel.commands import Command
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.kernels.kv_scales import EIGHT_BITS, KVScales, as_bytes
from specahead.kernels.kv_write import page_addresses
from specahead.kernels.paged_attention import VARIANCE_LIMIT


class KVCache:
    """The KV tensors of one model, each page at the index of its number.

    k_pages, v_pages: of each layer [pages, kv_heads, PAGE_SIZE, head_dim], values in 8 bits [pages, kv_heads, head_dim,
        PAGE_SIZE]; a page of one head is contiguous.
    scales: those of all layers, if pages are in 8 bits (specahead.kernels.kv_scales); else None.
    dtype: of keys and values before they are written, and of queries.
    addresses: of the pages, [2, layers] int64 on the device.
    page_means: for a model that chooses blocks by itself, of each layer [page numbers, kv_heads, head_dim], the mean
        key of each full page (kernels.page_means); else None.
    ranks: that run the model together; the pages hold the KV heads of this one, and page numbers are rank 0's.
    pool: of page numbers, which block tables name.
    """

    offloads = False
    """Whether pages may leave the GPU for a backing store."""

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        on_gpu: int | None = None,
        ranks: Ranks = ALONE,
        scales: KVScales | None = None,
        page_means: bool = False,
    ) -> None:
        """kv_heads: of this rank. on_gpu: pages of each layer's tensors; None: `num_pages`. scales: None: pages have
        the dtype. page_means: whether to keep the mean key of each full page.
        """
        held, pages = dtype if scales is None else EIGHT_BITS, (on_gpu or num_pages, kv_heads)
        of_values = (PAGE_SIZE, head_dim) if scales is None else (head_dim, PAGE_SIZE)
        self.k_pages = [kv_zeros((*pages, PAGE_SIZE, head_dim), held, device) for _ in range(num_layers)]
        self.v_pages = [kv_zeros((*pages, *of_values), held, device) for _ in range(num_layers)]
        of_means = num_pages, kv_heads, head_dim
        self.page_means = [kv_zeros(of_means, dtype, device) for _ in range(num_layers)] if page_means else None
        self.dtype, self.scales = dtype, scales
        self.addresses = page_addresses(self.k_pages, self.v_pages).to(device)
        self.num_layers, self.kv_heads, self.device = num_layers, kv_heads, torch.device(device)
        self.all_kv_heads, self.ranks = kv_heads * ranks.count, ranks
        self.pool = PagePool(num_pages)
        self.means: GroupMeanPool | None = None

    # Where pages lie.

    def begin_pass(self, work: list[tuple[SequenceKV, int]]) -> None:
        """Allocate pages on the GPU for a pass that adds the given number of tokens to each sequence.

        The tokens that these sequences have count as committed from now on. Raises OutOfPages if there is no room;
        then the sequences are unchanged.
        """
        if not self._grow_all(work):
            wanted = sum(_missing_pages(*item) for item in work)
            raise OutOfPages(f"{wanted} pages wanted, {self.pool.available} of {self.pool.num_pages} available")

    def gpu_pages(self, sequence: SequenceKV) -> np.ndarray:
        """Return each page's index in `k_pages` and `v_pages`, -1 for one that is not there: int32 [pages]."""
        return sequence.table()

    def is_resident(self, sequence: SequenceKV) -> bool:
        """Return whether all pages of a sequence have GPU pages, so that a block table can name them."""
        return True

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the pages of keys and values of a layer."""
        return self.k_pages[layer], self.v_pages[layer]

    def scales_of(self, layer: int) -> KVScales | None:
        """Return a layer's scales, if pages are in 8 bits."""
        return None if self.scales is None else self.scales.layer(layer)

    def make_means(self, pages: np.ndarray, slots: list[int]) -> None:
        """Make the means of groups and write them to `slots` of `means`. pages: int32 [groups, pages of a group]."""
        self.make_means_on_gpu(pages, slots)

    def make_means_on_gpu(self, gpu_pages: np.ndarray, slots: list[int]) -> None:
        """Make the means of groups, on all ranks, from pages on the GPU.

        gpu_pages: int32 [groups, pages of a group], indices in `k_pages` and `v_pages`. slots: as for `make_means`.
        """
        assert self.means is not None
        self.ranks.followers.tell(Command.MAKE_MEANS, [gpu_pages.shape[1], *slots, *gpu_pages.flatten().tolist()])
        make_means(self.k_pages, self.v_pages, gpu_pages, slots, self.means)

    # Reading sequences that are not resident.

    def can_fetch(self, dense_layers: tuple[int, ...], block_size: int) -> bool:
        """Return whether a step can fetch the listed pages that are not on the GPU.

        dense_layers: the layers that it reads densely. block_size: tokens of a block; 0: it reads everything.
        """
        return self.offloads and block_size > 0 and not dense_layers and block_size % PAGE_SIZE == 0

    def next_round(self) -> int:
        """Count a step that fetches; return its number, which `fetch_plan` and `chosen_fetcher` take as a tensor."""
        return 0

    def fetch_plan(
        self, lists: Tensor, counts: Tensor, block_size: int, page_tables: Tensor, round: Tensor
    ) -> FetchPlan | None:
        """Start to fetch the pages that a step lists; None if all KV always lies on the GPU. Launches only.

        The arguments are those of specahead.engine.kv.fetch.request_listed.
        """
        return None

    def chosen_fetcher(self, page_tables: Tensor, round: Tensor, last: LastChoices) -> ChosenFetcher | None:
        """Return the fetcher of the blocks that the layers of a step choose; None if all KV always lies on the GPU.

        It starts at once, with the blocks that they chose last. Launches only. The arguments are those of
        specahead.engine.kv.fetch.ChosenFetcher.
        """
        return None

    def count_step(self, results: Mapping[str, np.ndarray]) -> bool:
        """Count the pages that a step fetched; return whether all listed pages found room. If not, the step is void.

        results: counts of pages, int32. `listed`, `fetched` and `overflow` (pages without room) are [1]; `missed` is
        [sequences], the pages of listed blocks that were not wholly on the GPU before.
        """
        return True

    def stage(self, sequences: list[SequenceKV]) -> Iterator[StagedReads]:
        """Bring whole sequences together on the GPU; yield as many neighbours at a time as there is room for.

        Each part must be read before the next is taken. Raises ValueError for a sequence that does not fit alone.
        """
        return iter([self.stage_pages([sequence.table() for sequence in sequences])])

    def stage_pages(self, tables: list[np.ndarray]) -> StagedReads:
        """Bring whole sequences together on the GPU, as `stage` does. tables: the pages of each, int32 [pages]."""
        raise NotImplementedError(f"{type(self).__name__}: every sequence lies on the GPU, nothing is staged")

    # Checks and counters.

    def check_writable(self, pages: int, why: str) -> None:
        """Raise ValueError if `pages` pages cannot be written at once. why: for the message, who writes them."""

    @property
    def totals(self) -> dict[str, float]:
        """The tiers' counters since the start, by name; {} without tiers."""
        return {}

    @property
    def gauges(self) -> dict[str, float]:
        """The tiers' present numbers, by name; {} without tiers."""
        return {}

    # Group means.

    def keep_group_means(
        self, group_size: int, slots: int | None = None, variance_limit: float = VARIANCE_LIMIT
    ) -> None:
        """Allocate means of groups of `group_size` tokens, for sequences that are read sparsely.

        slots: groups of all sequences; None: as many as the pages have, which is too few if sequences share pages.
        variance_limit: as `GroupMeans` has it, to three places. No sequence may hold means when this is called.
        """
        if slots is None:
            slots = self.pool.num_pages * PAGE_SIZE // group_size
        self.ranks.followers.tell(Command.KEEP_MEANS, [group_size, slots, round(1000 * variance_limit)])
        self.means = GroupMeanPool(self.k_pages, group_size, slots, variance_limit)

    def extend_group_means(self, sequences: list[SequenceKV], lengths: Sequence[int]) -> GroupMeanPool:
        """Make the missing means of complete groups; raise ValueError if `keep_group_means` was not called.

        lengths: how many tokens of each sequence are committed.
        """
        if self.means is None:
            raise ValueError("no room for group means was made: call keep_group_means first")
        for sequence, length in zip(sequences, lengths, strict=True):
            self.means.extend(sequence, length, self.make_means)
        return self.means

    # Sequences.

    def grow(self, sequence: SequenceKV, length: int) -> None:
        """Allocate pages so that `length` tokens fit; the writer sets sequence.length. Raises OutOfPages."""
        missing = pages_for(length) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.pool.allocate(missing)

    def reserve(self, work: list[tuple[SequenceKV, int]]) -> bool:
        """Allocate pages for a pass that adds the given number of tokens to each sequence; return whether they fit.

        False, and nothing changes, if there are too few pages, or too few slots for the means of sequences that may be
        read sparsely.
        """
        if self.means is not None:
            sparse = [sequence for sequence, _ in work if sequence.drafts or not sequence.dense]
            if sum(self.means.missing(each, each.length) for each in sparse) > len(self.means.free):
                return False
        return self._grow_all(work)

    def _grow_all(self, work: list[tuple[SequenceKV, int]]) -> bool:
        """Allocate pages as `reserve` does; means are made by the passes that read them."""
        if sum(_missing_pages(*item) for item in work) > self.pool.available:
            return False
        for sequence, tokens in work:
            self.grow(sequence, sequence.length + tokens)
        return True

    def truncate(self, sequence: SequenceKV, length: int) -> None:
        """Roll back to `length` tokens: free the pages after them. It copies nothing.

        Raises ValueError for more tokens than there are, and if the last page that stays is indexed, shared or stored.
        """
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot truncate {sequence.length} tokens to {length}")
        if length < sequence.indexed * PAGE_SIZE:
            raise ValueError(f"cannot truncate to {length}: {sequence.indexed} pages are indexed by prefix")
        last = sequence.pages[length // PAGE_SIZE] if length % PAGE_SIZE else None
        if last is not None and self.pool.references[last] > 1:
            raise ValueError(f"cannot truncate to {length}: the page there is shared with another sequence")
        if last is not None and length < sequence.stored * PAGE_SIZE:
            raise ValueError(
                f"cannot truncate to {length}: the page there is in the backing store, or on its way there"
            )
        sequence.length = length
        keep = pages_for(length)
        self.pool.release(sequence.pages[keep:])
        sequence.drop_pages(keep)
        if self.means is not None:
            self.means.truncate(sequence)

    def take_back(self, sequence: SequenceKV, length: int) -> None:
        """Take what lies after `length` tokens out of the prefix index, so that the sequence may write it again.

        Raises ValueError if the page there is shared with another sequence.
        """
        whole, inside = divmod(length, PAGE_SIZE)
        if whole >= sequence.indexed:
            return
        if inside:
            page = sequence.pages[whole]
            if self.pool.references[page] > 1:
                raise ValueError(f"cannot take {length} tokens back: the page there is shared with another sequence")
            self.pool.forget([page])
        del sequence.serials[whole:]

    def release(self, sequence: SequenceKV) -> None:
        """Give all pages back; the sequence is empty afterwards.

        Of pages that are kept for their prefix the last is evicted first: pages after an evicted one cannot be found.
        """
        self.pool.release(sequence.pages[::-1])
        sequence.drop_pages(0)
        sequence.length, sequence.serials, sequence.last_choice = 0, [], LastChoice()
        if self.means is not None:
            self.means.truncate(sequence)

    @torch.inference_mode()
    def scrub(self, sequence: SequenceKV) -> None:
        """Zero the pages of a sequence whose KV may hold NaN, and take them out of the prefix index.

        A page that another sequence holds, too, keeps its KV. No step may be running.
        """
        self.pool.forget(sequence.pages)
        own = np.array([self.pool.references[page] == 1 for page in sequence.pages], dtype=bool)
        places = self.gpu_pages(sequence)
        zeroed = places[own & (places >= 0)]
        self.ranks.followers.tell(Command.SCRUB, zeroed.tolist())
        self.zero_pages(zeroed)

    def zero_pages(self, places: np.ndarray) -> None:
        """Zero pages in `k_pages` and `v_pages`, by their indices there."""
        index = torch.from_numpy(places).long().to(self.device)
        for tensor in (*self.k_pages, *self.v_pages):
            as_bytes(tensor).index_fill_(0, index, 0)

    def reuse_prefix(self, sequence: SequenceKV, tokens: list[int]) -> int:
        """Give an empty sequence the indexed pages of a prefix of `tokens`; return how many tokens they cover."""
        sequence.pages, sequence.serials = self.pool.match(blocks_of(tokens))
        sequence.length = sequence.indexed * PAGE_SIZE
        return sequence.length

    def knows(self, tokens: list[int]) -> bool:
        """Whether a page holds these tokens, PAGE_SIZE of them, as the beginning of a text."""
        return all(self.pool.prefixes.page_of((0, block)) is not None for block in blocks_of(tokens))

    def index_prefix(self, sequence: SequenceKV, tokens: list[int], committed: int | None = None) -> None:
        """Offer full pages of the first `committed` tokens, or of all tokens, to later sequences.

        Their KV must come of dense passes.
        """
        count = len(tokens) if committed is None else committed
        start, end = sequence.indexed * PAGE_SIZE, min(count, sequence.length)
        for block in blocks_of(tokens[start:end]) if end - start >= PAGE_SIZE else ():
            page = sequence.pages[sequence.indexed]
            sequence.serials.append(self.pool.index(page, (sequence.serial, block)))


def _missing_pages(sequence: SequenceKV, tokens: int) -> int:
    """Return how many pages a sequence lacks for `tokens` more tokens."""
    return max(0, pages_for(sequence.length + tokens) - len(sequence.pages))
