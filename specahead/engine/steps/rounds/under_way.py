"""Rounds that have been launched and not been waited for: what they leave on the device, and what they give."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.steps.rounds.buffers import RoundShape, read_round
from specahead.engine.steps.rounds.requests import RoundOutput, RoundRequest
from specahead.engine.steps.staging import Staging


@dataclass(frozen=True)
class LaunchedRound:
    """Requests that are drafted together. places: of each among all that were launched with it. runs_last: as of the
    settings.

    results: where the round leaves what it gives. done: comes when it has ended; None: it has.
    """

    places: list[int]
    requests: list[RoundRequest]
    shape: RoundShape
    results: Staging
    done: torch.cuda.Event | None
    runs_last: bool


@dataclass(frozen=True)
class RoundsUnderWay:
    """What was launched at once. To be waited for before the next ones are launched."""

    parts: list[LaunchedRound]

    def outputs(self) -> list[RoundOutput]:
        """Wait for the rounds and return what they give, in the order of the requests."""
        outputs: dict[int, RoundOutput] = {}
        for part in self.parts:
            if part.done is not None:
                part.done.synchronize()
            read = read_round(part.results.host, part.shape, part.requests, part.runs_last)
            outputs.update(zip(part.places, read, strict=True))
        return [outputs[i] for i in range(len(outputs))]

    @property
    def of_one_branch(self) -> bool:
        """Whether all are drafted together, each behind the tokens that there are."""
        return len(self.parts) == 1 and self.parts[0].shape.branches == 1

    def left(self) -> dict[str, Tensor]:
        """Return what rounds of one branch leave on the device.

        tokens: [requests, γ] int32; ids, probs: [requests, γ, support], of what they were drawn from, unless all are
        greedy; likeliest: [requests, γ, alternatives] int32, the likeliest tokens at each position, if they give some;
        bitmaps: [requests, rows, words] int64, the blocks that they announce, if they do.
        """
        if not self.of_one_branch:
            raise ValueError("rounds of several parts or branches leave nothing that a step could take: wait for them")
        (part,) = self.parts
        results, count = part.results.device, len(part.requests)
        drawn = {"tokens": "tokens", "ids": "ids", "probs": "probs", "likeliest": "alternatives"}
        drawn = {name: result for name, result in drawn.items() if result in results}
        proposed = slice(-1 if part.runs_last else None)
        left = {name: results[result][proposed, :count].transpose(0, 1) for name, result in drawn.items()}
        return left | ({"bitmaps": results["bitmaps"][:count]} if "bitmaps" in results else {})
