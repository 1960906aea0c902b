"""How a plan is written to its file."""

import json
from dataclasses import asdict
from pathlib import Path

from specahead.sparsity.plan import Plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Written beside and moved into place, so that no reader ever sees half a plan."""
    content = asdict(plan) | {"hash": plan.hash}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    draft = Path(f"{path}.part")
    draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    draft.replace(path)
