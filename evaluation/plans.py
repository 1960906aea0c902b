"""Plans that are not calibrated, and how a plan is written to its file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsity.plan import Plan


def uniform_plan(target_layers: int, target_kv_heads: int, draft_layers: int, draft_heads: int, **other: Any) -> Plan:
    """A plan with arbitrary, evenly spread maps, for tests and for pairs that are not calibrated."""
    pairs = [(i, j) for i in range(draft_layers) for j in range(draft_heads)]
    rows = tuple(
        tuple(pairs[(layer * target_kv_heads + head) % len(pairs)] for head in range(target_kv_heads))
        for layer in range(target_layers)
    )
    ones = tuple((1.0,) * target_kv_heads for _ in range(target_layers))
    maps = {
        "head_maps": ((other.get("budget", 0.1), rows),),
        "layer_map": tuple(layer * draft_layers // target_layers for layer in range(target_layers)),
        "blends": tuple(((*pair, 1.0),) for row in rows for pair in row),
        "head_importance": ones,
        "head_budgets": ones,
    }
    return Plan(target_layers, target_kv_heads, draft_layers, draft_heads, **(maps | other))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Written beside and moved into place, so that no reader ever sees half a plan."""
    content = asdict(plan) | {"hash": plan.hash}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    draft = Path(f"{path}.part")
    draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    draft.replace(path)
