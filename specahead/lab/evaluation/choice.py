"""Plain choices of blocks by their scores: what rivals read, and references for `specahead.kernels.selection`.

Scores are float [..., blocks], not negative; choices are bool of the same shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.selection import top_k_mask
from specahead.sparsity.plan import Plan


@dataclass(frozen=True)
class Rounds:
    """Rounds that follow one another in a sequence and run in one pass."""

    first: int
    """The position of the first token."""
    rows: int
    """Tokens of each round."""
    count: int

    @property
    def last(self) -> int:
        """The position behind the last token."""
        return self.first + self.rows * self.count

    @property
    def bases(self) -> range:
        """The committed tokens that each round builds on: its first token is the newest of them."""
        return range(self.first + 1, self.last + 1, self.rows)

    @property
    def lengths(self) -> range:
        """The tokens with KV at the end of each round."""
        return range(self.first + self.rows, self.last + 1, self.rows)


def choose(scores: Tensor, plan: Plan, rounds: Rounds) -> Tensor:
    """Return the heaviest blocks of each row that fit the plan's budget, mandatory blocks left out.

    It chooses from the blocks between sinks and window, and leaves room for these. scores: [rounds, ..., blocks].
    """
    flat, first = scores.flatten(0, -2), plan.sink_blocks
    ends, rooms = [], []
    for base, length in zip(rounds.bases, rounds.lengths, strict=True):
        start, end = plan.middle(plan.num_blocks(base))
        blocks = plan.num_blocks(length)
        ends.append(end)
        rooms.append(max(0, budget_blocks(plan, blocks) - (blocks - (end - start))))
    limits = torch.tensor([ends, rooms], device=scores.device).repeat_interleave(len(flat) // rounds.count, 1)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    between = slice(first, max(ends))
    chosen[:, between] = top_k_mask(flat[:, between], (limits[0] - first).clamp(min=0), limits[1])
    return chosen.view(scores.shape)


def choose_nucleus(scores: Tensor, mass: float = 0.95) -> Tensor:
    """Return the fewest of each row's heaviest blocks whose scores add up to `mass` of the row's sum."""
    ranked, order = scores.double().sort(stable=True, dim=-1, descending=True)
    heavier = ranked.cumsum(-1) - ranked  # the sum of what stands before
    inside = heavier < mass * ranked.sum(-1, keepdim=True)
    return torch.zeros_like(inside).scatter_(-1, order, inside)


def budget_blocks(plan: Plan, blocks: int) -> int:
    """Return how many of a head's blocks the budget has room for, mandatory ones included."""
    return min(blocks, max(1, math.ceil(plan.share(blocks) * blocks)))


def mandatory(plan: Plan, base: int, blocks: int, window: int | None = None) -> Tensor:
    """Return the sinks, the recent window before `base` and all blocks after it, bool [blocks]."""
    first, last = plan.middle(plan.num_blocks(base), window)
    always = torch.ones(blocks, dtype=torch.bool)
    always[first:last] = False
    return always


def mandatory_of(
    plan: Plan, rounds: Rounds, device: torch.device, windows: Sequence[int | None] | None = None
) -> Tensor:
    """Return what each round reads in any case, bool [rounds, 1, blocks of the last one].

    windows: of each round, in blocks; None: the plan's.
    """
    limits = [
        [*plan.middle(plan.num_blocks(base), window), plan.num_blocks(length)]
        for base, length, window in zip(rounds.bases, rounds.lengths, windows or [None] * rounds.count, strict=True)
    ]
    first, last, end = torch.tensor(limits, device=device).T[..., None, None]
    block = torch.arange(plan.num_blocks(rounds.last), device=device)
    return ((block < first) | (block >= last)) & (block < end)
