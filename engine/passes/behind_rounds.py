"""A pass that judges what a draft's rounds have left on the device, before the host has seen it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LeftRounds:
    """What the last rounds of a draft on the same device have left, one a place.

    tokens: [places, γ] int32; ids: [places, γ, support] int32 and probs: the same float32, what each was drawn from.
    bitmaps: [places, rows, words] int64, the blocks that were announced, a bit each; nothing where nothing was.
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor
    bitmaps: Tensor

    @staticmethod
    def make(places: int, gamma: int, support: int, bitmap: tuple[int, int], device: torch.device) -> "LeftRounds":
        """Return room for so many rounds of up to so many tokens. bitmap: rows and words of an announcement."""
        sizes = places, gamma, support
        tokens, ids = (torch.zeros(size, dtype=torch.int32, device=device) for size in (sizes[:2], sizes))
        bitmaps = torch.zeros(places, *bitmap, dtype=torch.int64, device=device)
        return LeftRounds(tokens, ids, torch.zeros(sizes, device=device), bitmaps)

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
    place, taken = given["behind"].long().clamp(min=0), given["behind"] >= 0
    if "bitmaps" in given:
        bitmaps, left = given["bitmaps"], given["left_bitmaps"]
        words = min(bitmaps.shape[2], left.shape[2])
        here = bitmaps[..., :words]
        here.copy_(left[place, :, :words].where(taken[:, None, None], here))
    known, left = given["draft_tokens"], given["left_tokens"]
    of_round = torch.arange(known.shape[1], device=known.device) - given["held"][:, None]  # of each token of the pass
    drawn = taken[:, None] & (of_round >= 0) & (of_round < left.shape[1])
    of_round = of_round.clamp(0, left.shape[1] - 1)
    known.copy_(left[place[:, None], of_round].where(drawn, known))
    if "support_ids" in given:
        for name in ("ids", "probs"):
            of_pass, left = given[f"support_{name}"], given[f"left_{name}"]
            here = of_pass[..., : min(of_pass.shape[2], left.shape[2])]
            here.copy_(left[place[:, None], of_round, : here.shape[2]].where(drawn[..., None], here))
    tokens, starts = given["token_ids"], given["query_starts"].long()
    row = torch.arange(len(tokens), device=tokens.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=len(taken) - 1)
    number = row - starts[sequence] - 1  # of the row's token among the drafted ones
    drafted = taken[sequence] & (number >= 0) & (number < given["draft_counts"][sequence])
    tokens.copy_(known[sequence, number.clamp(0, known.shape[1] - 1)].to(tokens.dtype).where(drafted, tokens))
