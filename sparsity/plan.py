"""The plan: everything about sparsity that is fixed for a pair of models, made offline, kept in a JSON file."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

PLAN_VERSION = 1


class PlanError(ValueError):
    """A plan that cannot be read or does not fit the models."""


@dataclass(frozen=True)
class Plan:
    """`head_map[layer][kv_head]` is the (draft layer, draft head) that speaks for that target KV head.

    block_size: tokens. budget: share of a sequence's blocks that a sparse layer reads, the mandatory ones
    included. sink_blocks, window_blocks: always read. dense_layers: target layers that read everything.
    """

    target_layers: int
    target_kv_heads: int
    draft_layers: int
    draft_heads: int
    head_map: tuple[tuple[tuple[int, int], ...], ...]
    block_size: int = 16
    budget: float = 0.1
    sink_blocks: int = 1
    window_blocks: int = 4
    dense_layers: tuple[int, ...] = (0, 1)
    version: int = PLAN_VERSION
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self._check(
            self.version == PLAN_VERSION, f"version {self.version}, this program reads {PLAN_VERSION}"
        )
        self._check(0 < self.budget <= 1, f"budget {self.budget} lies outside (0, 1]")
        self._check(
            self.block_size > 0 and self.block_size % 16 == 0,
            f"block_size {self.block_size}: a multiple of 16",
        )
        self._check(
            self.sink_blocks >= 0 and self.window_blocks >= 1, "sink_blocks >= 0 and window_blocks >= 1"
        )
        shape = [len(row) for row in self.head_map]
        self._check(
            shape == [self.target_kv_heads] * self.target_layers,
            f"head_map has rows of {shape}, expected {self.target_layers} rows of {self.target_kv_heads}",
        )
        self._check(
            all(0 <= n < self.target_layers for n in self.dense_layers), f"dense_layers {self.dense_layers}"
        )
        for layer, head in (pair for row in self.head_map for pair in row):
            known = 0 <= layer < self.draft_layers and 0 <= head < self.draft_heads
            self._check(known, f"head_map names draft head ({layer}, {head})")

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise PlanError(f"plan: {problem}")

    @property
    def hash(self) -> str:
        """Over all that changes a result; not over provenance."""
        content = {key: value for key, value in asdict(self).items() if key != "provenance"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def announced_heads(self) -> list[tuple[int, int]]:
        """The draft heads that sparse layers listen to, in the order of an announcement's rows."""
        sparse = [row for layer, row in enumerate(self.head_map) if layer not in self.dense_layers]
        return sorted({pair for row in sparse for pair in row})

    def num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def budget_blocks(self, num_blocks: int) -> int:
        return min(num_blocks, max(1, math.ceil(self.budget * num_blocks)))

    def middle(self, num_blocks: int) -> tuple[int, int]:
        """The blocks [first, last) that a policy may choose from: between the sinks and the recent window."""
        first = min(self.sink_blocks, num_blocks)
        return first, max(first, num_blocks - self.window_blocks)


def uniform_plan(
    target_layers: int, target_kv_heads: int, draft_layers: int, draft_heads: int, **other: Any
) -> Plan:
    """A plan with an arbitrary, evenly spread head map, for tests and for pairs that are not calibrated."""
    pairs = [(i, j) for i in range(draft_layers) for j in range(draft_heads)]
    rows = [
        tuple(pairs[(layer * target_kv_heads + head) % len(pairs)] for head in range(target_kv_heads))
        for layer in range(target_layers)
    ]
    return Plan(target_layers, target_kv_heads, draft_layers, draft_heads, tuple(rows), **other)


def save_plan(plan: Plan, path: str | Path) -> None:
    content = asdict(plan) | {"hash": plan.hash}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def load_plan(path: str | Path) -> Plan:
    """Raises PlanError if the file is no plan, of another version, or was edited without its hash."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not a readable plan: {error}") from error
    known = {item.name for item in fields(Plan)}
    if (
        not isinstance(content, dict)
        or set(content) - known - {"hash"}
        or not {"head_map", "hash"} <= set(content)
    ):
        raise PlanError(f"{path}: not a plan; expected the keys {sorted(known | {'hash'})}")
    stated = content.pop("hash")
    try:
        content["head_map"] = tuple(tuple((int(a), int(b)) for a, b in row) for row in content["head_map"])
        content["dense_layers"] = tuple(int(n) for n in content["dense_layers"])
        plan = Plan(**content)
    except (TypeError, ValueError, KeyError) as error:
        raise PlanError(f"{path}: {error}") from error
    if plan.hash != stated:
        raise PlanError(
            f"{path}: states hash {stated} but its content has {plan.hash}; make it again with calibrate"
        )
    return plan


def with_budget(plan: Plan, budget: float | None) -> Plan:
    """The plan with another budget; with 1.0 every block of every layer is read."""
    return plan if budget is None else replace(plan, budget=budget)
