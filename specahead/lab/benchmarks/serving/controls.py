"""What services under measurement take up from row to row without starting anew: a file that they read."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Controls:
    """How a draft drafts from the next row on."""

    attached: bool = True
    """Whether the draft is attached to its targets."""

    foresight: float = 0.0
    """At which share of all positions the draft's next choice is the token that the target adds."""

    @staticmethod
    def read(file: str) -> "Controls":
        return Controls(**json.loads(Path(file).read_text()))
