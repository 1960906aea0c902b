"""Rounds that go on behind what a step on the same device accepts, before the host has seen it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv.pages import PAGE_SIZE
from kernels.backends import default_backend
from kernels.cut_rounds import RoundsRows, StepsVerdicts, cut_rounds

Verdict = tuple[int, int]  # drafted tokens that are accepted, and the token that follows them


@dataclass(frozen=True)
class LeftVerdicts:
    """The verdicts that the last step of a target on the same device has left, one a place: int32 [places] each."""

    accepted: Tensor
    following: Tensor

    @staticmethod
    def make(places: int, device: torch.device) -> "LeftVerdicts":
        """Return room for the verdicts of so many sequences."""
        return LeftVerdicts(*(torch.zeros(places, dtype=torch.int32, device=device) for _ in range(2)))

    def take(self, left: dict[str, Tensor], held: Sequence[int], imposed: Sequence[Verdict] | None) -> None:
        """Copy what a step leaves (StepUnderWay.left), in the order of the device's stream; or what is imposed.

        held: how many tokens of each sequence it judges before those that were drafted. Where it rejects one of them,
        what is left is as if it had rejected all that were drafted: what goes on behind that is void.
        """
        if imposed is not None:
            left = dict(zip(("accepted", "following"), torch.tensor(imposed, dtype=torch.int32).unbind(1), strict=True))
        if any(held):
            accepted = left["accepted"]
            before = torch.tensor(held, dtype=accepted.dtype).to(accepted.device, non_blocking=True)
            left = left | {"accepted": (accepted - before).clamp(min=0)}
        for name, kept in vars(self).items():
            kept[: len(left[name])].copy_(left[name], non_blocking=True)


def take_left_verdicts(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a round (`make_round_buffers`) as they are behind the verdicts that a step has left.

    What the host gives is right where all tokens are accepted: sequences that are behind a step are cut by those that
    it rejects, and begin with two tokens, of which it adds the second. The first may have run before: its KV is written
    once more. Added are rejected: how many tokens are, int64 [sequences]; began: what of a step each round began
    behind, int32 [2, sequences].
    """
    left = StepsVerdicts(*(given[name] for name in ("behind", "judged", "left_accepted", "left_following")))
    of_rows = "lengths", "token_ids", "positions", "slots"
    rows = RoundsRows(given["query_starts"], tables=given["block_tables"], **{name: given[name] for name in of_rows})
    names = [name for name in ("previous", "uniforms", "limits", "words") if name in given]
    pairs = [(given[name], given[f"{name}_cut"]) for name in names]
    cut = cut_rounds(left, rows, pairs, PAGE_SIZE, default_backend(rows.slots.device))
    behind = {name: getattr(cut, name) for name in (*of_rows, "rejected", "began")}
    return given | behind | dict(zip(names, cut.numbers, strict=True))
