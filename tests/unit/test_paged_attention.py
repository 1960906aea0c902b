"""The attention kernels' torch references against a float64 attention over densified keys and masks."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.kv_scales import KVScales, keys_to_pages, values_by_token, values_to_pages
from specahead.kernels.kv_write import write_kv
from specahead.kernels.paged_attention import (
    Batch,
    BlockLists,
    GroupMeans,
    LayersEvidence,
    paged_attention,
    paged_attention_remembering,
    paged_attention_with_read_weights,
    pool_blocks,
    weights_of_last_queries,
)

GAMMA = 4
SCALE = 0.3
UNREAD = 2**30  # an entry past a list's count; reading it would be an index error


def weigh(
    batch: Batch,
    sums: Tensor,
    blocks: BlockLists | None = None,
    emitting: int = 1,
    block_size: int = 16,
    backend: Backend = "torch",
) -> Tensor:
    """Attend in one layer, and add a quarter of its weights to `sums` [sequences, heads, n]."""
    listed = None if blocks is None else BlockLists(blocks.lists[None], blocks.counts[None], blocks.block_size)
    size = block_size if blocks is None else blocks.block_size
    evidence = LayersEvidence(sums[:, None], 0.25, size, emitting, listed, backend=backend)
    return evidence.attend(0, batch, blocks, None)


@dataclass(frozen=True)
class Case:
    """A ragged batch. `lists[i][h]`: the logical pages that KV head h of sequence i reads; scales: of 8-bit pages."""

    queries: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    kv_lengths: list[int]
    query_counts: list[int]
    lists: list[list[list[int]]]
    scales: KVScales | None = None

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]

    @property
    def query_starts(self) -> Tensor:
        return torch.tensor([0, *np.cumsum(self.query_counts)], dtype=torch.int32)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        lengths = torch.tensor(self.kv_lengths, dtype=torch.int32)
        return self.queries, self.k_pages, self.v_pages, self.block_tables, lengths, self.query_starts

    @property
    def batch(self) -> Batch:
        return Batch(*self.arguments, SCALE, max(self.query_counts), scales=self.scales)

    def packed_lists(self, block_size: int = 0) -> BlockLists:
        counts = torch.tensor([[len(pages) for pages in heads] for heads in self.lists], dtype=torch.int32)
        packed = torch.full((*counts.shape, int(counts.max()) + 2), UNREAD, dtype=torch.int32)
        for i, heads in enumerate(self.lists):
            for h, pages in enumerate(heads):
                packed[i, h, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return BlockLists(packed, counts, block_size or self.page_size)

    def dense(self) -> Tensor:
        return paged_attention(self.batch)

    def sparse(self) -> Tensor:
        return paged_attention(self.batch, self.packed_lists())


def random_case(seed: int, group: int) -> Case:
    """1 … 5 sequences of 1 … 90 tokens with shuffled pages; plain steps, verifications and prompt chunks."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    page_size, kv_heads, dim = int(rng.choice([4, 16])), int(rng.integers(1, 4)), int(rng.choice([8, 16]))
    lengths = rng.integers(1, 91, rng.integers(1, 6)).tolist()
    kinds = [1, GAMMA + 1, 37]
    counts = [min(length, int(rng.choice(kinds))) for length in lengths]
    return shuffled_case(rng, lengths, counts, page_size, kv_heads, dim, group)


def shuffled_case(
    rng: np.random.Generator, lengths: list[int], counts: list[int], page_size: int, kv_heads: int, dim: int, group: int
) -> Case:
    """Sequences of these lengths and query counts over shuffled pages, with random lists of pages."""
    pages_of = [-(-length // page_size) for length in lengths]
    shuffled = rng.permutation(sum(pages_of) + 3).tolist()
    tables = torch.zeros(len(lengths), max(pages_of) + 1, dtype=torch.int32)
    for row, count in enumerate(pages_of):
        tables[row, :count] = torch.tensor([shuffled.pop() for _ in range(count)], dtype=torch.int32)
    lists = [
        [sorted(rng.permutation(count)[: rng.integers(0, count + 1)].tolist()) for _ in range(kv_heads)]
        for count in pages_of
    ]
    shape = (sum(pages_of) + 3, kv_heads, page_size, dim)
    queries = torch.randn(sum(counts), kv_heads * group, dim)
    return Case(queries, torch.randn(shape), torch.randn(shape), tables, lengths, counts, lists)


def densified(case: Case, i: int, pages: Tensor) -> np.ndarray:
    """[length, kv_heads, dim] float64: the tokens of sequence i in order."""
    at = np.arange(case.kv_lengths[i])
    table = case.block_tables[i].numpy()
    by = pages if pages is case.k_pages else values_by_token(pages)
    dense = by.double().numpy()[table[at // case.page_size], :, at % case.page_size]
    if case.scales is None:
        return dense
    which = int(pages is case.v_pages)
    return dense * case.scales.scales[which, :, None].double().numpy() + case.scales.centers[which].double().numpy()


def in_eight_bits(case: Case, eight_bit: bool = True) -> Case:
    """The case with its pages in 8 bits, by another scale for each head, if that is wanted."""
    if not eight_bit:
        return case
    kv_heads, _, dim = case.k_pages.shape[1:]
    scales = torch.exp2(torch.arange(2.0 * kv_heads) - 5).view(2, kv_heads).flip(1)
    of = KVScales(scales, torch.randn(2, kv_heads, dim))
    k = keys_to_pages(case.k_pages.transpose(1, 2), of).transpose(1, 2).contiguous()
    v = values_to_pages(case.v_pages.transpose(1, 2), of).permute(0, 2, 3, 1).contiguous()
    return replace(case, k_pages=k, v_pages=v, scales=of)


def every_block(case: Case, block_size: int) -> Case:
    lists = [[list(range(-(-n // block_size))) for _ in range(case.k_pages.shape[1])] for n in case.kv_lengths]
    return replace(case, lists=lists)


def reference_by_token(case: Case, block_size: int, means: GroupMeans | None = None) -> tuple[Tensor, list[np.ndarray]]:
    """Output [rows, heads, dim] and each sequence's weights [rows, heads, length], in float64 by hand."""
    outs, weights, starts = [], [], case.query_starts.tolist()
    for i, (length, rows) in enumerate(zip(case.kv_lengths, case.query_counts, strict=True)):
        keys, values = densified(case, i, case.k_pages), densified(case, i, case.v_pages)
        queries = case.queries.double().numpy()[starts[i] : starts[i + 1]]
        heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
        out, probs = np.zeros((rows, heads, keys.shape[2])), np.zeros((rows, heads, length))
        count = 0 if means is None else int(means.counts[i])
        for head in range(heads):
            kv_head = head // group
            listed = np.isin(np.arange(length) // block_size, case.lists[i][kv_head])
            for row in range(rows):
                q = queries[row, head]
                seen = np.flatnonzero(listed[: length - rows + row + 1])
                scores = list(keys[seen, kv_head] @ q * SCALE)
                vectors = list(values[seen, kv_head])
                for g in range(count):
                    slot, size = int(means.tables[i, g]), means.group_size
                    unread = size - int(listed[g * size : (g + 1) * size].sum())
                    k, v, var = (x[slot, kv_head].double().numpy() for x in (means.k, means.v, means.k_variance))
                    if case.scales is not None:
                        of_keys, of_values = case.scales.scales[:, kv_head].tolist()
                        centers = case.scales.centers[:, kv_head].double().numpy()
                        k, v, var = k * of_keys + centers[0], v * of_values + centers[1], var * of_keys**2
                    if unread:
                        spread = min(means.variance_limit, SCALE**2 * float(q**2 @ var) / 2)
                        scores.append(k @ q * SCALE + spread + np.log(unread))
                        vectors.append(v)
                if scores:
                    exps = np.exp(np.array(scores) - max(scores))
                    share = exps / exps.sum()
                    out[row, head] = share @ np.array(vectors)
                    probs[row, head, seen] = share[: len(seen)]
        outs.append(out)
        weights.append(probs)
    return torch.from_numpy(np.concatenate(outs)).float(), weights


cases = pytest.mark.parametrize(("seed", "group"), [(100 * group + i, group) for group in (1, 2, 4) for i in range(5)])
both_widths = pytest.mark.parametrize("eight_bit", [False, True])


@cases
@both_widths
def test_dense_attention_is_the_reference(seed: int, group: int, eight_bit: bool) -> None:
    case = in_eight_bits(random_case(seed, group), eight_bit)
    wanted, _ = reference_by_token(every_block(case, case.page_size), case.page_size)
    torch.testing.assert_close(case.dense(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_write_kv_stores_where_it_is_told_and_nowhere_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    k_pages, v_pages = torch.randn(7, 3, 4, 5), torch.randn(7, 3, 4, 5)
    slots = torch.from_numpy(rng.permutation(28)[: rng.integers(1, 20)])
    keys, values = torch.randn(len(slots), 3, 5), torch.randn(len(slots), 3, 5)
    wanted = k_pages.clone(), v_pages.clone()
    for row, slot in enumerate(slots.tolist()):
        for head in range(3):
            wanted[0][slot // 4, head, slot % 4] = keys[row, head]
            wanted[1][slot // 4, head, slot % 4] = values[row, head]
    write_kv(k_pages, v_pages, slots, keys, values)
    assert torch.equal(k_pages, wanted[0])
    assert torch.equal(v_pages, wanted[1])


def in_blocks(case: Case, block_size: int, seed: int) -> Case:
    """The same case with lists of blocks of another size: none, all, or some in any order."""
    rng = np.random.default_rng(seed)

    def draw(blocks: int) -> list[int]:
        count = rng.choice([0, blocks, rng.integers(0, blocks + 1)], p=[0.15, 0.15, 0.7])
        return sorted(rng.permutation(blocks)[:count].tolist())

    kv_heads = case.k_pages.shape[1]
    return replace(case, lists=[[draw(-(-n // block_size)) for _ in range(kv_heads)] for n in case.kv_lengths])


def assert_read_weights(weights: Tensor, probs: list[np.ndarray], case: Case, block_size: int) -> None:
    """Sum over a KV head's query heads of the mean over queries, in the lists' order; 0 past their counts."""
    kv_heads = case.k_pages.shape[1]
    assert weights.dtype == torch.float32
    assert weights.shape == case.packed_lists(block_size).lists.shape
    for i, by_token in enumerate(probs):
        by_head = by_token.mean(0).reshape(kv_heads, -1, by_token.shape[-1]).sum(1)
        for head, listed in enumerate(case.lists[i]):
            by_block = [by_head[head, b * block_size : (b + 1) * block_size].sum() for b in listed]
            np.testing.assert_allclose(weights[i, head, : len(listed)].numpy(), by_block, atol=2e-5)
            assert not weights[i, head, len(listed) :].any()


def group_means(case: Case, group_size: int) -> GroupMeans:
    """Return means of every group that ends before the first query, in shuffled slots; other slots hold NaN."""
    counts = [(n - rows) // group_size for n, rows in zip(case.kv_lengths, case.query_counts, strict=True)]
    kv_heads, dim = case.k_pages.shape[1], case.k_pages.shape[3]
    slots = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    k, v, variance = torch.full((3, len(slots), kv_heads, dim), torch.nan)
    tables = torch.full((len(counts), max(counts) + 1), UNREAD, dtype=torch.int32)
    for i, count in enumerate(counts):
        at, shape = [slots.pop() for _ in range(count)], (count, group_size, kv_heads, dim)
        tables[i, :count] = torch.tensor(at, dtype=torch.int32)
        keys, values = (
            densified(replace(case, scales=None), i, pages)[: count * group_size].reshape(shape)
            for pages in (case.k_pages, case.v_pages)
        )
        k[at], v[at] = torch.from_numpy(keys.mean(1)).float(), torch.from_numpy(values.mean(1)).float()
        variance[at] = torch.from_numpy(keys.var(1)).float()
    return GroupMeans(k, v, variance, tables, torch.tensor(counts, dtype=torch.int32), group_size, 0.7)


def sizes(case: Case) -> list[int]:
    """Some that divide a page, the page's own, and some of several pages."""
    page = case.page_size
    return sorted({1, 2, page // 2, page, 2 * page, 4 * page})


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 64])
def test_empty_lists_of_any_block_size_give_zeros(block_size: int, width: int) -> None:
    case = page_16_case(0, 2)
    shape = (len(case.kv_lengths), case.k_pages.shape[1])
    lists = torch.full((*shape, width), UNREAD, dtype=torch.int32)
    blocks = BlockLists(lists, torch.zeros(shape, dtype=torch.int32), block_size)
    zeros = torch.zeros_like(case.queries)
    assert torch.equal(paged_attention(case.batch, blocks), zeros)
    got, weights = paged_attention_with_read_weights(case.batch, blocks)
    assert torch.equal(got, zeros)
    assert torch.equal(weights, torch.zeros(*shape, width))


@cases
@both_widths
def test_lists_of_blocks_of_any_size_and_their_weights_are_the_reference(
    seed: int, group: int, eight_bit: bool
) -> None:
    """Lists of any order and length, none at all included; entries past a count are never read."""
    case = in_eight_bits(random_case(seed, group), eight_bit)
    for size in sizes(case):
        chosen = in_blocks(case, size, seed)
        blocks = chosen.packed_lists(size)
        wanted, probs = reference_by_token(chosen, size)
        got, weights = paged_attention_with_read_weights(chosen.batch, blocks)
        for out in (got, paged_attention(chosen.batch, blocks)):
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-4)
        assert_read_weights(weights, probs, chosen, size)


def assert_stood_in(case: Case, block_size: int, means: GroupMeans) -> None:
    """Output and weights are the reference's, and the listed blocks' weights leave what the means get."""
    blocks = case.packed_lists(block_size)
    wanted, probs = reference_by_token(case, block_size, means)
    got, weights = paged_attention_with_read_weights(case.batch, blocks, means)
    torch.testing.assert_close(got, wanted, atol=3e-5, rtol=1e-4)
    assert torch.equal(got, paged_attention(case.batch, blocks, means))
    assert_read_weights(weights, probs, case, block_size)
    # Past the counts may stand a block that is one of a group, as the 0 that lists are padded with.
    padded = replace(blocks, lists=blocks.lists.where(blocks.lists != UNREAD, 0))
    assert torch.equal(got, paged_attention(case.batch, padded, means))
    group = case.queries.shape[1] // case.k_pages.shape[1]
    for i, heads in enumerate(case.lists):
        stood_in = int(means.counts[i]) * means.group_size
        for head, listed in enumerate(heads):
            mass = float(weights[i, head].sum())
            assert mass <= group + 1e-4
            if len([b for b in listed if b * block_size < stood_in]) * block_size < stood_in:
                assert mass < group


GROUPS_AND_BLOCKS = [(group, block) for group in (64, 128) for block in (1, 16, 32, 64)]


def page_16_case(seed: int, group: int) -> Case:
    """Before the queries: several groups of 64, exactly two, a token less than two, a part of one, nothing."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    counts = rng.choice([1, 2, GAMMA + 1], 5).tolist()
    before = [int(rng.integers(256, 300)), 128, 127, int(rng.integers(20, 64)), 0]
    lengths = [n + rows for n, rows in zip(before, counts, strict=True)]
    return shuffled_case(rng, lengths, counts, 16, 2, 8, group)


@pytest.mark.parametrize(("group_size", "block_size"), GROUPS_AND_BLOCKS)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_group_means_are_the_reference(group: int, group_size: int, block_size: int) -> None:
    seed = group_size + block_size + group
    case = in_blocks(page_16_case(seed, group), block_size, seed)
    case = replace(case, queries=2 * case.queries)
    means = group_means(case, group_size)
    assert means.counts.tolist() == ([4, 2, 1, 0, 0] if group_size == 64 else [2, 1, 0, 0, 0])
    assert_stood_in(case, block_size, means)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("emitting", [1, 3, 5])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_last_queries_give_their_weights(group: int, emitting: int, block_size: int) -> None:
    rng = np.random.default_rng(emitting)
    torch.manual_seed(emitting)
    counts = [emitting, emitting + 2, 7, 7]
    lengths = [emitting, 130, 64, 7]
    case = shuffled_case(rng, lengths, counts, 16, 2, 8, group)
    weights = weights_of_last_queries(case.batch, block_size, emitting)
    assert weights.shape == (4, emitting, 2 * group, -(-130 // block_size))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    _, by_sequence = reference_by_token(every_block(case, 16), 16)
    for i, by_token in enumerate(by_sequence):
        pooled = pool_blocks(torch.from_numpy(by_token[-emitting:]), block_size).numpy()
        np.testing.assert_allclose(weights[i, :, :, : pooled.shape[-1]].numpy(), pooled, atol=1e-5)
        assert not weights[i, :, :, pooled.shape[-1] :].any()


@pytest.mark.parametrize(("block_size", "decay"), [(1, 0.0), (16, 0.8), (64, 0.5)])
def test_a_dense_pass_remembers_the_weights_of_all_blocks(block_size: int, decay: float) -> None:
    rng = np.random.default_rng(block_size)
    case = shuffled_case(rng, [130, 7, 64], [5, 5, 1], 16, 2, 16, 3)
    before = torch.rand(4, 2, 192 // block_size)
    memory, places = before.clone(), torch.tensor([2, -1, 0], dtype=torch.int32)
    out = paged_attention_remembering(case.batch, block_size, memory, places, decay)
    wanted, weights = reference_by_token(every_block(case, 16), 16)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-4)
    for i, place in ((0, 2), (2, 0)):
        pooled = pool_blocks(torch.from_numpy(weights[i]).float(), block_size)
        mean = pooled.unflatten(1, (2, -1)).sum(2).mean(0)
        expected = torch.zeros(2, before.shape[2])
        expected[:, : mean.shape[1]] = torch.maximum(mean, before[place, :, : mean.shape[1]] * decay)
        torch.testing.assert_close(memory[place], expected, atol=2e-6, rtol=1e-4)
    assert torch.equal(memory[[1, 3]], before[[1, 3]]), "of sequences without a place nothing is remembered"
