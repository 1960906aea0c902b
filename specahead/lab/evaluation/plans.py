"""How a plan is written to its file."""

from dataclasses import asdict
from pathlib import Path

from specahead.lab.results import write_json
from specahead.sparsity.plan import Plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan with its hash."""
    write_json(path, asdict(plan) | {"hash": plan.hash})
