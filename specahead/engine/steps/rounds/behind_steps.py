"""Rounds that go on behind what a step on the same device accepts, before the host has seen it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.kernels.backends import default_backend
from specahead.kernels.rollback_rows import RoundsRows, StepsVerdicts, cut_rounds

Verdict = tuple[int, int]  # drafted tokens that are accepted, and the token that follows them
# The same, and the last accepted token if it is an alternative to the one that was drafted, else NO_ALTERNATIVE.
Imposed = tuple[int, int, int]
NO_ALTERNATIVE = -1
_LEFT = "accepted", "following", "alternative"


@dataclass(frozen=True)
class LeftVerdicts:
    """The verdicts that the last step of a target on the same device has left, one a place: int32 [places] each.

    alternative: the last accepted token, if it is an alternative to the one that was drafted; else -1.
    """

    accepted: Tensor
    following: Tensor
    alternative: Tensor

    @staticmethod
    def make(places: int, device: torch.device) -> "LeftVerdicts":
        """Return room for the verdicts of so many sequences."""
        return LeftVerdicts(*(torch.zeros(places, dtype=torch.int32, device=device) for _ in range(3)))

    def take(self, left: dict[str, Tensor], held: Sequence[int], imposed: Sequence[Imposed] | None) -> None:
        """Copy what a step leaves (StepUnderWay.left), in the order of the device's stream; or what is imposed.

        held: how many tokens of each sequence it judges before those that were drafted. Where it rejects one of them,
        what is left is as if it had rejected all that were drafted: what goes on behind that is void.
        """
        if imposed is not None:
            left = dict(zip(vars(self), torch.tensor(imposed, dtype=torch.int32).unbind(1), strict=True))
        elif "alternative" not in left:
            self.alternative.fill_(NO_ALTERNATIVE)
        if any(held):
            accepted = left["accepted"]
            before = torch.tensor(held, dtype=accepted.dtype).to(accepted.device, non_blocking=True)
            left = left | {"accepted": (accepted - before).clamp(min=0)}
        for name, given in left.items():
            vars(self)[name][: len(given)].copy_(given, non_blocking=True)


def take_left_verdicts(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a round (`make_round_buffers`) as they are behind the verdicts that a step has left.

    What the host gives is right where all tokens are accepted: sequences that are behind a step are cut by those that
    it rejects, and begin with two tokens, of which it adds the second. The first may have run before: its KV is written
    once more, as it must be where it is an alternative. Added are rejected: how many tokens are, int64 [sequences];
    began: what of a step each round began behind, int32 [3, sequences].
    """
    left = StepsVerdicts(given["behind"], given["judged"], *(given[f"left_{name}"] for name in _LEFT))
    of_rows = "lengths", "token_ids", "positions", "slots"
    rows = RoundsRows(given["query_starts"], tables=given["block_tables"], **{name: given[name] for name in of_rows})
    names = [name for name in ("previous", "uniforms", "limits", "words") if name in given]
    pairs = [(given[name], given[f"{name}_cut"]) for name in names]
    cut = cut_rounds(left, rows, pairs, PAGE_SIZE, default_backend(rows.slots.device))
    behind = {name: getattr(cut, name) for name in (*of_rows, "rejected", "began")}
    return given | behind | dict(zip(names, cut.numbers, strict=True))
