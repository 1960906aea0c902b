"""Whether steps over KV in tiers give what steps over resident KV give: logits, bit by bit."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """rounds: that were compared. same: whether all of them agree in every bit; None where there was nothing to compare
    with. difference: the greatest of their logits; not a number where a logit is none."""

    rounds: int = 0
    same: bool | None = None
    difference: float | None = None

    def __str__(self) -> str:
        if self.same is None:
            return "-"
        return "yes" if self.same else f"no, {self.difference:.1e}"


def compare_logits(got: list[Tensor | None], wanted: list[Tensor | None]) -> Check:
    """Round by round, [batch, queries, vocab] each; those that either side has None for are void."""
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if a is not None and b is not None]
    if not pairs:
        return Check()
    same, difference = True, torch.zeros(())
    for one, other in pairs:
        apart = (one.float() - other.float()).abs().max()
        same = same and bool(apart.isfinite()) and torch.equal(_bits(one), _bits(other))
        difference = torch.maximum(difference, apart)  # hands on what is not a number
    return Check(len(pairs), same, float(difference))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
