"""Plans that tests read by: those of the bundled pair, by which short texts are read sparsely, too."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from specahead import models
from specahead.lab.evaluation.plans import save_plan
from specahead.sparsity.plan import Plan, load_plan


def bundled_plan(**changes: Any) -> Plan:
    """Return the bundled pair's plan with changes, by which short texts are read sparsely, too."""
    return replace(load_plan(models.PLAN), **({"least_tokens": 0} | changes))


@cache
def sparse_plan_file() -> str:
    """Return the path of a file with `bundled_plan()`: tests of what is sparse are fast on short texts."""
    file = Path(tempfile.mkdtemp(prefix="specahead-test-")) / "plan.json"
    save_plan(bundled_plan(), file)
    return str(file)
