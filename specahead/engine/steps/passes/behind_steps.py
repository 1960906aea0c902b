"""A step that goes on behind the one before it, on the device, before the host has seen what that one gives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.steps.passes.shape import PassShape
from specahead.engine.steps.rounds.behind_steps import Verdict

MOST_UNDER_WAY = 1024  # sequences of a step that the next one follows before the host has seen it
# By position; a step that may begin at several has those of all of them, in buffers whose names end in AHEAD.
UNIFORMS = "draft_uniforms", "accept_uniforms", "draw_uniforms"
AHEAD = "_ahead"


@dataclass(frozen=True)
class LeftStep:
    """What the last step has left, by its sequences: accepted, of the drafted tokens, int32, and the tokens that follow
    them, int64.
    """

    accepted: Tensor
    following: Tensor

    @staticmethod
    def make(device: torch.device) -> "LeftStep":
        """Return room for the largest step."""
        accepted, following = (torch.zeros(MOST_UNDER_WAY, dtype=each) for each in (torch.int32, torch.int64))
        return LeftStep(accepted.to(device), following.to(device))

    def impose(self, verdicts: Sequence[Verdict]) -> None:
        """Put others in the place of the verdicts that were left, in the order of the device's stream."""
        for left, given in zip((self.accepted, self.following), zip(*verdicts, strict=True), strict=True):
            left[: len(given)].copy_(torch.tensor(given, dtype=left.dtype), non_blocking=True)


def leave_step(given: dict[str, Tensor], accepted: Tensor, following: Tensor) -> None:
    """Leave the verdicts of a pass [sequences] for the next one, those of sequences that there are.

    given: the buffers of the pass. While a graph is made its launches run without sequences, between a step that leaves
    something and one that takes it.
    """
    for left, of_pass in ((given["left_accepted"], accepted), (given["left_following"], following)):
        here = left[: len(of_pass)]
        here.copy_(of_pass.to(left.dtype).where(given["lengths"] > 0, here))


def take_left_step(given: dict[str, Tensor], shape: PassShape) -> None:
    """Put what the last step has left where a pass takes it from, of the sequences that follow it.

    given: the buffers of the pass. A sequence that drafts begins behind what was accepted: the host gives what would be
    right if nothing was. It launches only.
    """
    place, taken = given["follows"].long().clamp(min=0), given["follows"] >= 0
    first = given["token_ids"].view(shape.sequences, shape.queries)[:, 0]
    first.copy_(given["left_following"][place].where(taken, first))
    if not shape.drafts:
        return
    accepted = given["left_accepted"][place].where(taken, 0)
    given["lengths"] += accepted
    given["blocks"].copy_(-(-given["lengths"] // shape.block_size))
    positions, slots = (given[name].view(shape.sequences, shape.queries) for name in ("positions", "slots"))
    positions += accepted[:, None]
    page = given["block_tables"].gather(1, (positions // PAGE_SIZE).clamp(max=shape.pages - 1)).long()
    slots.copy_((page * PAGE_SIZE + positions % PAGE_SIZE).where(taken[:, None], slots))
    for name in UNIFORMS:
        if name + AHEAD in given:
            of_all = given[name + AHEAD]
            here = torch.arange(of_all.shape[1] - shape.queries + 1, device=of_all.device) + accepted[:, None]
            given[name] = of_all.gather(1, here.long())
