"""Queries on different branches of one sequence: each sees the shared tokens before it and those of its own branch.

Both backends against a float64 softmax over exactly these tokens; Triton on a GPU, or interpreted.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.paged_attention import Batch, BlockLists, paged_attention
from tests.unit.test_paged_attention import SCALE, Case, densified, in_eight_bits, shuffled_case, weigh
from tests.unit.test_paged_attention_triton import on_device

BRANCHES, TAIL = 3, 5  # branches of a sequence; tokens that each may hold
BACKENDS: list[Backend] = ["torch"] + (["triton"] if importlib.util.find_spec("triton") else [])


def branched(seed: int, group: int, drafted: int, eight_bit: bool) -> tuple[Case, Tensor]:
    """Return sequences whose queries are the newest tokens of branches that hold `drafted` tokens each.

    The branches leave the shared tokens at different positions and lie behind them, TAIL tokens apart.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shared = rng.integers(4, 80, 2)
    lengths = [int(length) + BRANCHES * TAIL for length in shared]
    case = shuffled_case(rng, lengths, [BRANCHES] * 2, 16, 2, 16, group)
    visible = []
    for length in shared.tolist():
        for branch in range(BRANCHES):
            first = length + branch * TAIL
            visible.append((int(length - rng.integers(0, 4)), first, first + drafted))
    return in_eight_bits(case, eight_bit), torch.tensor(visible, dtype=torch.int32)


def by_hand(case: Case, visible: Tensor, read: list[list[set[int]]]) -> tuple[Tensor, list[np.ndarray]]:
    """Return the outputs, and each sequence's weights [queries, heads, tokens]; read: pages by sequence and KV head."""
    outs, weights = [], []
    kv_heads, group = case.k_pages.shape[1], case.queries.shape[1] // case.k_pages.shape[1]
    for i, length in enumerate(case.kv_lengths):
        keys, values = densified(case, i, case.k_pages), densified(case, i, case.v_pages)
        at = np.arange(length)
        probs = np.zeros((BRANCHES, kv_heads * group, length))
        for row in range(BRANCHES):
            before, first, last = visible[i * BRANCHES + row].tolist()
            for head in range(kv_heads * group):
                listed = np.isin(at // 16, list(read[i][head // group]))
                seen = ((at < before) | ((at >= first) & (at < last))) & listed
                query = case.queries[i * BRANCHES + row, head].double().numpy()
                scores = np.where(seen, keys[:, head // group] @ query * SCALE, -np.inf)
                if seen.any():
                    scores = np.exp(scores - scores.max())
                    probs[row, head] = scores / scores.sum()
        weights.append(probs)
        repeated = values.repeat(group, 1)
        outs.append(torch.from_numpy(np.einsum("rhn,nhd->rhd", probs, repeated)).float())
    return torch.cat(outs), weights


def quarter_by_block(probs: np.ndarray) -> Tensor:
    """Return a quarter of what 8 blocks weigh, on average over queries: [heads, 8]. probs: [queries, heads, tokens]"""
    padded = np.pad(probs.mean(0), ((0, 0), (0, 8 * 16 - probs.shape[2])))
    return 0.25 * torch.from_numpy(padded.reshape(-1, 8, 16).sum(-1)).float()


def batch_of(case: Case, visible: Tensor) -> Batch:
    return replace(case.batch, visible=visible)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("seed", "group", "drafted", "eight_bit"), [(0, 1, 1, False), (1, 4, 3, False), (2, 3, 5, True), (3, 6, 2, True)]
)
def test_dense_and_its_weights(seed: int, group: int, drafted: int, eight_bit: bool, backend: Backend) -> None:
    case, visible = branched(seed, group, drafted, eight_bit)
    everything = [[set(range(100))] * 2] * 2
    wanted, weights = by_hand(case, visible, everything)
    batch = on_device(batch_of(case, visible))
    torch.testing.assert_close(paged_attention(batch, backend=backend).cpu(), wanted, atol=2e-5, rtol=1e-4)
    sums = torch.zeros(2, case.queries.shape[1], 8, device=batch.queries.device)
    out = weigh(batch, sums, None, BRANCHES, backend=backend)
    torch.testing.assert_close(out.cpu(), wanted, atol=2e-5, rtol=1e-4)
    for i, probs in enumerate(weights):
        torch.testing.assert_close(sums[i].cpu(), quarter_by_block(probs), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("seed", "group", "drafted", "eight_bit"), [(3, 1, 1, False), (4, 4, 4, False), (5, 7, 5, True)]
)
def test_lists_and_their_mean_weights(seed: int, group: int, drafted: int, eight_bit: bool, backend: Backend) -> None:
    case, visible = branched(seed, group, drafted, eight_bit)
    blocks: BlockLists = case.packed_lists()
    wanted, weights = by_hand(case, visible, [[set(pages) for pages in heads] for heads in case.lists])
    batch, lists = on_device((batch_of(case, visible), blocks))
    before = torch.rand(2, case.queries.shape[1], 8, device=lists.lists.device)
    sums = before.clone()
    out = weigh(batch, sums, lists, BRANCHES, backend=backend)
    torch.testing.assert_close(out.cpu(), wanted, atol=2e-5, rtol=1e-4)
    for i, probs in enumerate(weights):
        torch.testing.assert_close(sums[i].cpu(), before[i].cpu() + quarter_by_block(probs), atol=2e-5, rtol=1e-4)
