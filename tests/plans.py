"""Plans that tests read by: those of the bundled pair, by which short texts are read sparsely, too. And selections."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specahead import models
from specahead.lab.evaluation.plans import save_plan
from specahead.sparsity.announce import announce_rounds
from specahead.sparsity.plan import Plan, load_plan
from specahead.sparsity.selection import BlockSelection


def bundled_plan(**changes: Any) -> Plan:
    """Return the bundled pair's plan with changes, by which short texts are read sparsely, too."""
    return replace(load_plan(models.PLAN), **({"least_tokens": 0} | changes))


@cache
def sparse_plan_file() -> str:
    """Return the path of a file with `bundled_plan()`: tests of what is sparse are fast on short texts."""
    file = Path(tempfile.mkdtemp(prefix="specahead-test-")) / "plan.json"
    save_plan(bundled_plan(), file)
    return str(file)


def announce(evidence: Tensor, plan: Plan, base: int, last: BlockSelection | None = None) -> BlockSelection:
    """Return the announcement of one round (`announce_rounds`)."""
    return announce_rounds([evidence], plan, [base], last)[0]


def selection_of(lists: Sequence[Sequence[int]], num_blocks: int) -> BlockSelection:
    """Return a selection of the blocks of each head."""
    chosen = np.zeros((len(lists), num_blocks), dtype=bool)
    for row, blocks in zip(chosen, lists, strict=True):
        row[list(blocks)] = True
    return BlockSelection.from_matrix(chosen)
