"""How a benchmark's services go on from row to row without starting anew: a file that they read."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Controls:
    """How a draft drafts from the next row on.

    attached: whether it may dial the target yet. replay: a file of selections (replay.py), or none.
    foresight: at this share of all positions the token that the target adds, which is imposed, is the draft's next one.
    branches: at most as many as the service was started with. self_drafting: whether a target does so that can.
    """

    micro_batches: int = 2
    branches: int = 1
    replay: str = ""
    attached: bool = True
    foresight: float = 0.0
    self_drafting: bool = False

    @staticmethod
    def read(file: str) -> "Controls":
        return Controls(**json.loads(Path(file).read_text()))
