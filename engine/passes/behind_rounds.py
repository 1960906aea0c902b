"""A pass that judges what a draft's rounds have left on the device, before the host has seen it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LeftRounds:
    """What the last rounds of a draft on the same device have left, one a place.

    tokens: [places, γ] int32; ids: [places, γ, support] int32 and probs: the same float32, what each was drawn from.
    """

    tokens: Tensor
    ids: Tensor
    probs: Tensor

    @staticmethod
    def make(places: int, gamma: int, support: int, device: torch.device) -> "LeftRounds":
        """Return room for so many rounds of up to so many tokens."""
        sizes = places, gamma, support
        tokens, ids = (torch.zeros(size, dtype=torch.int32, device=device) for size in (sizes[:2], sizes))
        return LeftRounds(tokens, ids, torch.zeros(sizes, device=device))

    def take(self, tokens: Tensor, drawn_from: tuple[Tensor, Tensor] | None) -> None:
        """Copy what rounds leave (RoundsUnderWay.left), in the order of the device's stream."""
        count, gamma = tokens.shape
        self.tokens[:count, :gamma].copy_(tokens)
        if drawn_from is not None:
            support = drawn_from[0].shape[2]
            for kept, given in zip((self.ids, self.probs), drawn_from, strict=True):
                kept[:count, :gamma, :support].copy_(given)


def take_left_tokens(given: dict[str, Tensor]) -> None:
    """Put what the rounds have left where a pass takes its drafted tokens from, of the sequences that run behind them.

    given: the buffers of the pass. It launches only.
    """
    place, taken = given["behind"].long().clamp(min=0), given["behind"] >= 0
    known = given["draft_tokens"]
    gamma = min(known.shape[1], given["left_tokens"].shape[1])
    known[:, :gamma] = given["left_tokens"][place, :gamma].where(taken[:, None], known[:, :gamma])
    if "support_ids" in given:
        for name, left in (("support_ids", given["left_ids"]), ("support_probs", given["left_probs"])):
            of_pass = given[name]
            support = min(of_pass.shape[2], left.shape[2])
            here = of_pass[:, :gamma, :support]
            here.copy_(left[place, :gamma, :support].where(taken[:, None, None], here))
    tokens, starts = given["token_ids"], given["query_starts"].long()
    row = torch.arange(len(tokens), device=tokens.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=len(taken) - 1)
    number = row - starts[sequence] - 1  # of the row's token among the drafted ones
    drafted = taken[sequence] & (number >= 0) & (number < given["draft_counts"][sequence])
    tokens.copy_(known[sequence, number.clamp(0, known.shape[1] - 1)].to(tokens.dtype).where(drafted, tokens))
