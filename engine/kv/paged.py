"""KV whose pages all lie on the model's device, each at the index of its number."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kv.cache import KVCache
from engine.kv.fetch import FetchPlan
from engine.kv.group_means import GroupMeanPool, make_means
from engine.kv.pages import PAGE_SIZE, SequenceKV
from engine.kv.pool import PagePool
from engine.kv.staged import StagedReads
from engine.kv.tensors import kv_zeros


class PagedKV(KVCache):
    """The KV of one model in `num_pages` pages of one device. Every sequence is resident, and nothing is fetched."""

    offloads = False

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_pages, kv_heads, PAGE_SIZE, head_dim)
        keys, values = ([kv_zeros(shape, dtype, device) for _ in range(num_layers)] for _ in range(2))
        super().__init__(keys, values, kv_heads, PagePool(num_pages), torch.device(device))

    def begin_pass(self, work: list[tuple[SequenceKV, int]]) -> None:
        for sequence, tokens in work:
            self.grow(sequence, sequence.length + tokens)

    def gpu_pages(self, sequence: SequenceKV) -> np.ndarray:
        return sequence.table()

    def is_resident(self, sequence: SequenceKV) -> bool:
        return True

    def make_means(self, pages: np.ndarray, slots: Tensor, pool: GroupMeanPool) -> None:
        make_means(self.k_pages, self.v_pages, pages, slots, pool)

    def can_fetch(self, width: int, dense_layers: tuple[int, ...], block_size: int) -> bool:
        return False

    def next_round(self) -> int:
        return 0

    def fetch_plan(
        self, lists: Tensor, counts: Tensor, block_size: int, page_tables: Tensor, round: Tensor, overlap: bool = True
    ) -> FetchPlan | None:
        return None

    def count_step(self, results: Mapping[str, np.ndarray], block_size: int) -> bool:
        return True

    def stage(self, sequences: list[SequenceKV]) -> StagedReads | None:
        return None

    def staging_parts(self, sequences: Sequence[SequenceKV]) -> list[range]:
        return [range(len(sequences))]

    def check_dense_layers(self, dense_layers: tuple[int, ...]) -> None:
        return

    def check_writable(self, pages: int, why: str) -> None:
        return

    def fork(self, sequence: SequenceKV) -> SequenceKV:
        shared = sequence.pages[: sequence.length // PAGE_SIZE]
        twin = SequenceKV(sequence.length, list(shared), min(sequence.indexed, len(shared)), sequence.serial)
        if sequence.length % PAGE_SIZE:
            self.grow(twin, sequence.length)
            for pages in (*self.k_pages, *self.v_pages):
                pages[twin.pages[-1]] = pages[sequence.pages[len(shared)]]
        self.pool.share(shared)
        return twin
