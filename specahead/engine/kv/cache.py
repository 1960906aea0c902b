"""The KV of a model in pages of its device, and what a runner and the services ask of KV wherever its pages lie.

`TieredKV` (engine.kv.tiered) has a backing store in host memory, and only some of the pages on the GPU. Both answer the
same questions, so that nobody outside asks which of them it has. The order of a pass:

    begin_pass        pages for the tokens to come, and GPU pages to write them to
    gpu_pages         where a sequence's pages lie in `k_pages` and `v_pages`, if it is resident
    can_fetch         otherwise: whether a step fetches what it lists (fetch_plan); else sequences are staged
    count_step        after a step that fetched: its counters, and whether everything found room
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.fetch import FetchPlan
from specahead.engine.kv.group_means import GroupMeanPool, make_means
from specahead.engine.kv.pages import PAGE_SIZE, OutOfPages, SequenceKV, kv_zeros, pages_for
from specahead.engine.kv.pool import PagePool
from specahead.engine.kv.prefix_index import next_prefix
from specahead.engine.kv.staged import StagedReads
from specahead.kernels.kv_write import page_addresses


class KVCache:
    """The KV tensors of one model, each page at the index of its number.

    k_pages, v_pages: one tensor a layer, [pages, kv_heads, PAGE_SIZE, head_dim]: a (page, head) is contiguous.
    addresses: where these lie, [2, layers] int64 on the device.
    pool: of page numbers; block tables name these. kept_layers: layers whose pages always lie at their page numbers,
    while those of the other layers lie where `gpu_pages` says.
    """

    kept_layers: tuple[int, ...] = ()
    offloads = False  # whether pages may leave the GPU for a backing store

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        sizes: list[int] | None = None,
    ) -> None:
        """sizes: pages of each layer's tensors; `num_pages` each if None."""
        shapes = [(size, kv_heads, PAGE_SIZE, head_dim) for size in sizes or [num_pages] * num_layers]
        self.k_pages, self.v_pages = ([kv_zeros(shape, dtype, device) for shape in shapes] for _ in range(2))
        self.addresses = page_addresses(self.k_pages, self.v_pages).to(device)
        self.num_layers, self.kv_heads, self.device = num_layers, kv_heads, torch.device(device)
        self.pool = PagePool(num_pages)
        self.means: GroupMeanPool | None = None

    # Where pages lie.

    def begin_pass(self, work: list[tuple[SequenceKV, int]]) -> None:
        """Make ready for a pass that adds so many tokens to each sequence: have pages, on the GPU, to write them to.

        The tokens that these sequences have are committed from now on. Raises OutOfPages if there is no room; then the
        sequences are as they were.
        """
        if not self._grow_all(work):
            wanted = sum(_missing_pages(*item) for item in work)
            raise OutOfPages(f"{wanted} pages wanted, {self.pool.available} of {self.pool.num_pages} available")

    def gpu_pages(self, sequence: SequenceKV) -> np.ndarray:
        """Return each page's index in `k_pages` and `v_pages`, -1 for one that is not there: int32 [pages]."""
        return sequence.table()

    def is_resident(self, sequence: SequenceKV) -> bool:
        """Return whether all pages of a sequence lie on the GPU as whole pages, so that a block table can name them."""
        return True

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, [pages, kv_heads, PAGE_SIZE, head_dim] each."""
        return self.k_pages[layer], self.v_pages[layer]

    def make_means(self, pages: np.ndarray, slots: Tensor, pool: GroupMeanPool) -> None:
        """Make the means of groups from their pages, int32 [groups, pages of a group], at `slots` of the pool."""
        make_means(self.k_pages, self.v_pages, pages, slots, pool)

    # Reading sequences that are not resident.

    def can_fetch(self, width: int, dense_layers: tuple[int, ...], block_size: int) -> bool:
        """Return whether a step can fetch what it lists and is not on the GPU.

        width: blocks of its lists, at most; 0: it has none. dense_layers: that it reads wholly.
        """
        return self.offloads and width > 0 and dense_layers == self.kept_layers and block_size % PAGE_SIZE == 0

    def next_round(self) -> int:
        """Count a step that fetches, and return its number, which `fetch_plan` takes as a tensor."""
        return 0

    def fetch_plan(
        self, lists: Tensor, counts: Tensor, block_size: int, page_tables: Tensor, round: Tensor
    ) -> FetchPlan | None:
        """Start to fetch what a step lists; None if everything always lies on the GPU. Launches only.

        The arguments are those of specahead.engine.kv.fetch.request_listed.
        """
        return None

    def count_step(self, results: Mapping[str, np.ndarray], block_size: int) -> bool:
        """Count what a step fetched; returns whether all that it listed found room. If not, the step is void.

        results: `listed`, `fetched`, `overflow` [1] and `missed` [sequences] int32 (engine.kv.fetch.FetchPlan).
        """
        return True

    def fetched_pages(self, sequence: SequenceKV) -> Tensor | None:
        """Return which pages of a sequence the last step brought from the host, if it read them: bool [layers,
        kv_heads, pages] on the CPU. None where everything always lies on the GPU. No step may be running.
        """
        return None

    def stage(self, sequences: list[SequenceKV]) -> Iterator[StagedReads]:
        """Bring whole sequences together on the GPU, as many neighbours at a time as there is room for.

        Each is to be read before the next is taken. Raises ValueError for a sequence that does not fit alone.
        """
        raise NotImplementedError(f"{type(self).__name__}: every sequence lies on the GPU, nothing is staged")

    # Checks, and what is told of it.

    def check_dense_layers(self, dense_layers: tuple[int, ...]) -> None:
        """Raise ValueError for a sparse read that lists blocks of a layer whose KV is kept whole on the GPU."""
        if not set(self.kept_layers) <= set(dense_layers):
            raise ValueError(
                f"layers {self.kept_layers} stay on the GPU to be read wholly; a step reads only {dense_layers} so"
            )

    def check_writable(self, pages: int, why: str) -> None:
        """Raise ValueError if so many pages cannot be written at once. why: who writes them, for the message."""

    @property
    def totals(self) -> dict[str, float]:
        """Return counters since the start, by name; those of the tiers, if there are any."""
        return {}

    @property
    def gauges(self) -> dict[str, float]:
        """Return how things stand now, by name; of the tiers, if there are any."""
        return {}

    # Group means.

    def keep_group_means(self, group_size: int, slots: int | None = None) -> None:
        """Have room for means of groups of `group_size` tokens, for sequences that are read sparsely.

        slots: groups over all sequences; as many as fit the pages if None, which is too few for sequences that
        share pages. No sequence may hold means when this is called.
        """
        if slots is None:
            slots = self.pool.num_pages * PAGE_SIZE // group_size
        self.means = GroupMeanPool(self.k_pages, group_size, slots)

    def extend_group_means(self, sequences: list[SequenceKV], lengths: Sequence[int] | None = None) -> GroupMeanPool:
        """Make the missing means of complete groups from the pages. Raises ValueError if no room was made for them.

        lengths: how many tokens of each are committed; None: all.
        """
        if self.means is None:
            raise ValueError("no room for group means was made: call keep_group_means first")
        for sequence, length in zip(sequences, lengths or [each.length for each in sequences], strict=True):
            self.means.extend(sequence, length, self.make_means)
        return self.means

    # Sequences.

    def grow(self, sequence: SequenceKV, length: int) -> None:
        """Allocate pages so that `length` tokens fit; sequence.length is left to the writer. Raises OutOfPages."""
        missing = pages_for(length) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.pool.allocate(missing)

    def reserve(self, work: list[tuple[SequenceKV, int]]) -> bool:
        """Have pages for a pass that adds so many tokens to each sequence. Returns False, and changes nothing, if there
        are too few, or too few slots for the means of sequences that may be read sparsely.
        """
        if self.means is not None:
            sparse = [sequence for sequence, _ in work if sequence.drafts or not sequence.dense]
            if sum(map(self.means.missing, sparse)) > len(self.means.free):
                return False
        return self._grow_all(work)

    def _grow_all(self, work: list[tuple[SequenceKV, int]]) -> bool:
        """Have pages as `reserve` says; means are made as they are needed, by passes that read them."""
        if sum(_missing_pages(*item) for item in work) > self.pool.available:
            return False
        for sequence, tokens in work:
            self.grow(sequence, sequence.length + tokens)
        return True

    def truncate(self, sequence: SequenceKV, length: int) -> None:
        """Roll back to `length` tokens: free the pages behind it. It copies nothing.

        Raises ValueError for more tokens than there are, or if the last page that stays is indexed, shared or stored.
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
        """Let nobody meet what of a page lies behind `length` tokens, so that the sequence may write it anew, also
        where it was indexed by prefix. Raises ValueError if the page there is shared with another sequence.
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

        Where they are kept for their prefix the last page is evicted first, since those behind an evicted one are lost.
        """
        self.pool.release(sequence.pages[::-1])
        sequence.drop_pages(0)
        sequence.length, sequence.serials, sequence.dense_tokens = 0, [], math.inf
        if self.means is not None:
            self.means.truncate(sequence)

    @torch.inference_mode()
    def scrub(self, sequence: SequenceKV) -> None:
        """Let nobody meet the KV of a sequence that may hold NaN: its prefixes are forgotten, its own pages zeros.

        A page that another sequence holds as well keeps its KV. No step may be running.
        """
        self.pool.forget(sequence.pages)
        own = np.array([self.pool.references[page] == 1 for page in sequence.pages], dtype=bool)
        for layer, tensors in enumerate(zip(self.k_pages, self.v_pages, strict=True)):
            places = sequence.table() if layer in self.kept_layers else self.gpu_pages(sequence)
            index = torch.from_numpy(places[own & (places >= 0)]).long().to(self.device)
            for tensor in tensors:
                tensor.index_fill_(0, index, 0.0)

    def reuse_prefix(self, sequence: SequenceKV, tokens: list[int], sparse: bool = False) -> int:
        """Let an empty sequence take over indexed pages that hold a prefix of `tokens`; returns the tokens covered.

        sparse: also pages whose KV comes of a sparse read, behind those whose does not.
        """
        for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
            found = self.pool.match(next_prefix(sequence, tokens))
            if found is None and sparse and sequence.dense_tokens == math.inf:
                sequence.dense_tokens = start
                found = self.pool.match(next_prefix(sequence, tokens))
                sequence.dense_tokens = math.inf if found is None else sequence.dense_tokens
            if found is None:
                break
            page, serial = found
            sequence.pages.append(page)
            sequence.serials.append(serial)
        sequence.length = sequence.indexed * PAGE_SIZE
        return sequence.length

    def index_prefix(self, sequence: SequenceKV, tokens: list[int], committed: int | None = None) -> None:
        """Offer full pages to later sequences: of the `committed` first tokens, or of all.

        Their KV must not come of a sparse read, but for that of a prompt behind its `dense_tokens`.
        """
        count = len(tokens) if committed is None else committed
        while (sequence.indexed + 1) * PAGE_SIZE <= min(count, sequence.length):
            page = sequence.pages[sequence.indexed]
            sequence.serials.append(self.pool.index(page, next_prefix(sequence, tokens)))


def _missing_pages(sequence: SequenceKV, tokens: int) -> int:
    """Return how many pages a sequence lacks for so many tokens more."""
    return max(0, pages_for(sequence.length + tokens) - len(sequence.pages))
