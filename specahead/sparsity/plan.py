"""The plan: everything about sparsity that is fixed for a pair of models, made offline, kept in a JSON file."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

PLAN_VERSION = 5
METHOD = "ahead"  # the only one; older plans name it, and their hashes cover its name
LEAST_TOKENS = 1024  # `Plan.least_tokens` of served plans
LEAST_DIVERGENCE, DIVERGENCES = 0.1, 4  # `Plan.max_divergence`, at least; as many times as calibration has found
ALL_TOKENS = 2**31 - 1  # a `Plan.least_tokens` beyond every sequence, so that everything is read

Blend = tuple[tuple[int, int, float], ...]  # (draft layer, draft head, weight)


HUB_NAME = "specahead-plan.json"  # of a plan in a folder or a repository of Hugging Face, next to a model or not
_ID = re.compile(r"[\w-][\w.-]*/[\w.-]*(?<!\.json)")  # of such a repository


class PlanError(ValueError):
    """A plan that cannot be read or does not fit the models."""


@dataclass(frozen=True)
class Plan:
    """How a draft's attention tells which KV blocks its target reads."""

    target_layers: int
    target_kv_heads: int
    draft_layers: int
    draft_heads: int
    # For each target head, layer by layer, the draft heads and weights whose sum predicts its block weights best.
    blends: tuple[Blend, ...]
    # [layer][kv_head]: how much a unit of the head's attention weight counts in a budget shared by all heads.
    head_importance: tuple[tuple[float, ...], ...]
    # The share of the KV that a sparse layer reads on average, mandatory blocks and summaries included.
    budget: float = 0.1
    # The least number of tokens that a sparse layer reads on average: a sequence of no more is read wholly.
    least_tokens: int = 0
    # Tokens of a block.
    block_size: int = 16
    # Tokens of a group, whose means stand in for its unread blocks; 0: none do.
    group_size: int = 512
    # The most that the variance of a group's keys adds to its score. Pairs that are calibrated have less, since keys of
    # larger models are far from normal.
    variance_limit: float = 2.0
    # Blocks at a sequence's beginning, and before its committed end, that are always read.
    sink_blocks: int = 1
    window_blocks: int = 4
    # Target layers that read everything.
    dense_layers: tuple[int, ...] = ()
    # The part of its budget that `ahead` gives to the draft's choice.
    announced_share: float = 0.9
    # How many times its weight a block counts that `ahead` announced in the round before.
    stickiness: float = 1.3
    # The factor by which the target's own weights fade in each round.
    memory_decay: float = 0.8
    version: int = PLAN_VERSION
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise PlanError(f"plan: version {self.version}, this program reads {PLAN_VERSION}")
        self._check_numbers()
        self._check_maps()

    def _check_numbers(self) -> None:
        size = self.block_size
        self._check(0 < self.budget <= 1, f"budget {self.budget} lies outside (0, 1]")
        self._check(self.least_tokens >= 0, f"least_tokens {self.least_tokens} lies below 0")
        self._check(size > 0 and (size % 16 == 0 or 16 % size == 0), f"block_size {size}: a divisor or multiple of 16")
        group = self.group_size
        self._check(
            group == 0 or (group % 16 == 0 and group % size == 0), f"group_size {group}: whole blocks and pages"
        )
        self._check(0 <= self.variance_limit < 100, f"variance_limit {self.variance_limit} lies outside [0, 100)")
        self._check(self.sink_blocks >= 0 and self.window_blocks >= 1, "sink_blocks >= 0 and window_blocks >= 1")
        self._check(0 <= self.announced_share <= 1 and 0 <= self.memory_decay < 1, "announced_share or memory_decay")
        self._check(self.stickiness >= 1, f"stickiness {self.stickiness} lies below 1")
        known = all(0 <= layer < self.target_layers for layer in self.dense_layers)
        self._check(known, f"dense layers {self.dense_layers}")

    def _check_maps(self) -> None:
        layers, kv_heads = self.target_layers, self.target_kv_heads
        shape = [len(row) for row in self.head_importance]
        self._check(
            shape == [kv_heads] * layers, f"head_importance has rows of {shape}, expected {layers} of {kv_heads}"
        )
        self._check(len(self.blends) == layers * kv_heads, f"{len(self.blends)} blends, expected {layers * kv_heads}")
        named = {(layer, head) for blend in self.blends for layer, head, _ in blend}
        heads = f"{self.draft_layers} x {self.draft_heads}"
        for layer, head in named:
            known = 0 <= layer < self.draft_layers and 0 <= head < self.draft_heads
            self._check(known, f"names draft head ({layer}, {head}), the draft has {heads}")

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise PlanError(f"plan: {problem}")

    @cached_property
    def hash(self) -> str:
        """A hash over everything that changes a result, which provenance does not."""
        content = {"method": METHOD} | {key: value for key, value in asdict(self).items() if key != "provenance"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def is_calibrated(self) -> bool:
        """Whether the maps were found on texts; else they follow from the models' sizes (`uniform_plan`)."""
        return bool(self.provenance)

    @property
    def acceptance(self) -> float | None:
        """The chance that the target accepts a drafted token, on the texts of calibration; None if it is not known."""
        known = self.provenance.get("acceptance")
        return float(known) if isinstance(known, int | float) and 0 <= known <= 1 else None

    @property
    def max_divergence(self) -> float:
        """The total variation, from 0 to 1, of what sparse and dense rounds say of a token, on average, that a session
        is held below: four times the mean on the texts of calibration, and 0.1 at least or where that is not known.
        """
        known = self.provenance.get("divergence")
        usual = float(known) if isinstance(known, int | float) and 0 <= known <= 1 else 0.0
        return min(1.0, max(LEAST_DIVERGENCE, DIVERGENCES * usual))

    @cached_property
    def sparse_layers(self) -> list[int]:
        return [layer for layer in range(self.target_layers) if layer not in self.dense_layers]

    @property
    def uses_means(self) -> bool:
        """Whether group means stand in for what is not read."""
        return self.group_size > 0 and self.budget < 1

    def num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def reads_wholly(self, tokens: int) -> bool:
        """Return whether a sequence of `tokens` is so short that all of it is read."""
        return self.budget == 1 or tokens <= self.least_tokens

    def share(self, num_blocks: int) -> float:
        """Return the share of `num_blocks` that a sparse layer reads on average: the budget, or least_tokens."""
        return min(1.0, max(self.budget, self.least_tokens / max(1, num_blocks * self.block_size)))

    def middle(self, num_blocks: int, window: int | None = None) -> tuple[int, int]:
        """Return the blocks [first, last) to choose from: between the sinks and the recent window, in blocks."""
        first = min(self.sink_blocks, num_blocks)
        return first, max(first, num_blocks - (self.window_blocks if window is None else window))


def uniform_plan(target_layers: int, target_kv_heads: int, draft_layers: int, draft_heads: int, **other: Any) -> Plan:
    """Return the plan of a pair that nobody has calibrated. Both sides derive the same one from the models' sizes.

    A target layer listens to the draft layer at the same share of the depth, a KV head evenly to the draft heads at its
    share of the heads; all heads are equally important. The plan of a target without a draft has one draft head, which
    announces nothing.
    """
    layer_map = tuple(layer * draft_layers // target_layers for layer in range(target_layers))
    starts = [head * draft_heads // target_kv_heads for head in range(target_kv_heads + 1)]
    heads = [range(start, max(start + 1, end)) for start, end in pairwise(starts)]
    maps = {
        "blends": tuple(tuple((i, j, 1 / len(js)) for j in js) for i in layer_map for js in heads),
        "head_importance": tuple((1.0,) * target_kv_heads for _ in range(target_layers)),
    }
    return Plan(target_layers, target_kv_heads, draft_layers, draft_heads, **(maps | other))


def find_plan(name: str | Path) -> Path:
    """Return the file of a plan, which is downloaded if it is not here.

    name: a file; a folder that holds HUB_NAME; or the id of a repository of Hugging Face that does, such as org/name.
    Raises PlanError if there is none.
    """
    path = Path(name)
    if path.is_dir():
        path /= HUB_NAME
    elif not path.exists() and _ID.fullmatch(str(name)):
        from transformers.utils import cached_file

        try:
            path = Path(cached_file(str(name), HUB_NAME))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise PlanError(f"{name}: no such file, and no {HUB_NAME} from Hugging Face: {reason}") from error
    return path


def load_plan(path: str | Path) -> Plan:
    """Read a plan, wherever `find_plan` finds it.

    Raises PlanError if there is none, or if the file is no plan, has another version, or was edited without its hash.
    """
    path = find_plan(path)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not a readable plan: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(content, dict) and content.get("version", PLAN_VERSION) != PLAN_VERSION:
        raise PlanError(f"{path}: version {content['version']}, this program reads {PLAN_VERSION}; calibrate again")
    known = {item.name for item in fields(Plan)}
    if isinstance(content, dict) and content.get("method") == METHOD:
        del content["method"]
    if not isinstance(content, dict) or set(content) != known | {"hash"}:
        raise PlanError(f"{path}: not a plan; expected the keys {sorted(known | {'hash'})}")
    stated = content.pop("hash")
    try:
        plan = Plan(**{key: value if key == "provenance" else _tuples(value) for key, value in content.items()})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PlanError(f"{path}: {error}") from error
    if plan.hash != stated:
        raise PlanError(f"{path}: states hash {stated} but its content has {plan.hash}; make it again with calibrate")
    return plan


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
