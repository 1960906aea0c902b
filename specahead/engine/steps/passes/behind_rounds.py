"""A pass that judges what a draft's rounds have left on the device, before the host has seen it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.backends import default_backend
from specahead.kernels.copy_drafts import Beside, Drafted, PassRows, take_drafted


@dataclass(frozen=True)
class LeftRounds:
    """What the last rounds of a draft on the same device have left, one a place.

    tokens: [places, γ] int32; ids: [places, γ, support] int32 and probs: the same float32, what each was drawn from.
    likeliest: [places, γ, 2] int32, the two likeliest tokens there.
    bitmaps: [places, rows, words] int64, the blocks that were announced, a bit each; nothing where nothing was.
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor
    likeliest: Tensor
    bitmaps: Tensor

    @staticmethod
    def make(places: int, gamma: int, support: int, bitmap: tuple[int, int], device: torch.device) -> "LeftRounds":
        """Return room for so many rounds of up to so many tokens. bitmap: rows and words of an announcement."""
        sizes = places, gamma, support
        of_tokens = (sizes[:2], sizes, (places, gamma, 2))
        tokens, ids, likeliest = (torch.zeros(size, dtype=torch.int32, device=device) for size in of_tokens)
        bitmaps = torch.zeros(places, *bitmap, dtype=torch.int64, device=device)
        return LeftRounds(tokens, ids, torch.zeros(sizes, device=device), likeliest, bitmaps)

    def take(self, left: dict[str, Tensor]) -> None:
        """Copy what rounds leave (RoundsUnderWay.left), in the order of the device's stream."""
        if "bitmaps" not in left:
            self.bitmaps.zero_()
        for name, given in left.items():
            kept = vars(self)[name]
            if name == "bitmaps":
                given = given[..., : kept.shape[2]]  # what lies beyond a target's context is never announced
                kept[: len(given)].zero_()
            kept[tuple(slice(size) for size in given.shape)].copy_(given)


def take_left_rounds(given: dict[str, Tensor]) -> None:
    """Put what the rounds have left where a pass takes its drafted tokens from, of the sequences that run behind them.

    given: the buffers of the pass. It launches only.
    """
    rows = PassRows(*(given[name] for name in ("behind", "held", "draft_counts", "query_starts")))
    drafted = Drafted(given["draft_tokens"], *(given.get(name) for name in ("support_ids", "support_probs", "bitmaps")))
    left = Drafted(*(given[f"left_{name}"] for name in ("tokens", "ids", "probs", "bitmaps")))
    beside = None
    if "alternatives" in given:
        beside = Beside(given["alternatives"], given["alternative_counts"], given["left_likeliest"])
    take_drafted(rows, given["token_ids"], drafted, left, beside, default_backend(left.tokens.device))
