"""Plans that tests read by."""

from dataclasses import replace
from typing import Any

import models
from sparsity.plan import Plan, load_plan


def bundled_plan(**changes: Any) -> Plan:
    """Return the bundled pair's plan with changes, by which short texts are read sparsely, too."""
    return replace(load_plan(models.PLAN), **({"least_tokens": 0} | changes))
