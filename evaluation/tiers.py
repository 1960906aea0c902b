"""What it costs to let means stand in for late KV, over a target whose KV lies in tiers (engine.tiered_kv).

Passages are read as the target serves them with `ahead`: prompts in chunks, then rounds of γ + 1 of the text's own
tokens, announced by the draft from its weights at these. Late is what the target would have to fetch without an
announcement: blocks of its own choice that are not hot. `fetch` brings these; `means` leaves them to the group means.
All else that is listed is fetched, so what `fetch` gives must be what the target gives without tiers.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from tqdm import tqdm

from engine.batch import SequenceInput
from engine.families import read_decoder
from engine.graphs import GraphRunner
from engine.late_kv import LATE_KV
from engine.loading import default_device, load_model, load_runner, make_runner, resolve_dtype
from engine.paged_kv import PAGE_SIZE, SequenceKV, pages_for
from engine.runner import Runner
from evaluation.cases import Case
from evaluation.report import align
from evaluation.rounds import Drafted, asked_of, prefill, rounds_of, run_draft
from evaluation.run import Pair
from sparsity.announce import announce
from sparsity.methods import METHODS
from sparsity.plan import Plan
from sparsity.reader import Reader
from sparsity.selection import BlockSelection

METHOD = "ahead"
CHUNK = 128  # prompt tokens that a pass reads: few, so that few frames do


@dataclass(frozen=True)
class TierRow:
    """hot: frames, as a share of a case's pages; 1: no tiers. fetched, late: of the blocks that rounds read."""

    hot: float
    late_kv: str
    perplexity: float
    increase: float  # over that without tiers, a share
    fetched: float
    late: float


@dataclass
class _Sums:
    nll: float = 0.0
    scored: int = 0
    read: int = 0
    fetched: int = 0
    late: int = 0

    def add(self, other: "_Sums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def measure(
    pair: Pair, plan: Plan, cases: list[Case], hot: Sequence[float], gamma: int, dtype_name: str = "auto"
) -> list[TierRow]:
    """A row without tiers, and two for each share of hot pages. Raises ValueError for shares out of (0, 1)."""
    if not all(0 < share < 1 for share in hot):
        raise ValueError(f"hot must be shares between 0 and 1, got {list(hot)}")
    device = default_device()
    dtype = resolve_dtype(dtype_name, device)
    longest = max(len(case.tokens) for case in cases) + gamma + 1
    draft = load_runner(pair.draft, dtype, device, longest + PAGE_SIZE)
    model = load_model(pair.target, dtype, device)
    ways = [(1.0, LATE_KV[0]), *((share, late) for share in hot for late in LATE_KV)]
    totals = [_Sums() for _ in ways]
    for case in tqdm(cases, desc="tiers", unit="case"):
        drafted = run_draft(draft, case, gamma, plan.block_size)
        for way, total in zip(ways, totals, strict=True):
            target = _open(model, *way, longest, gamma)
            target.kv.keep_group_means(plan.group_size)
            total.add(_measure(target, plan, case, drafted, gamma))
    return [_row(*way, total, totals[0]) for way, total in zip(ways, totals, strict=True)]


def _open(model: nn.Module, hot: float, late_kv: str, longest: int, gamma: int) -> GraphRunner:
    pages = pages_for(longest) + 1
    tokens = int(hot * pages) * PAGE_SIZE
    tiers = (pages * PAGE_SIZE, longest, late_kv) if hot < 1 else ()
    plain = make_runner(model, tokens, *tiers)
    return GraphRunner(read_decoder(model), plain, longest, enforce_eager=True, step_queries=gamma + 1)


@torch.inference_mode()
def _measure(target: Runner, plan: Plan, case: Case, drafted: Drafted, gamma: int) -> _Sums:
    reader, kv, sums = Reader(METHODS[METHOD], plan, shares_budget=True), SequenceKV(), _Sums()
    announcing = METHODS[METHOD].announcing
    assert announcing is not None
    last: BlockSelection | None = None
    prefill(target, kv, case.tokens[: case.start], CHUNK)
    for (first, end), evidence in zip(rounds_of(case, gamma), drafted.evidence, strict=True):
        rule = METHODS[METHOD].rule_of(plan)
        (last,) = announce(announcing, evidence, plan, rule, first + 1, last)
        read = reader.read([last], first + 1, end)
        (output,) = target.forward([SequenceInput(kv, case.tokens[first:end], "all", read)])
        reader.finish(output.read_weights, output.blocks_read)
        assert output.logits is not None
        _score(sums, case, first, output.logits)
        sums.read += (output.blocks_read or 0) * plan.block_size
        sums.late += output.tokens_late
        sums.fetched += output.tokens_fetched
    target.kv.release(kv)
    return sums


def _score(sums: _Sums, case: Case, first: int, logits: Tensor) -> None:
    inside, wanted = asked_of(case, first, min(len(logits), len(case.tokens) - first - 1))
    log_probs = logits.float().log_softmax(-1)[inside].cpu()
    sums.nll -= float(log_probs.gather(1, wanted[:, None]).sum())
    sums.scored += len(inside)


def _row(hot: float, late_kv: str, sums: _Sums, without: _Sums) -> TierRow:
    perplexity, plain = (float(torch.tensor(s.nll / s.scored).exp()) for s in (sums, without))
    read = max(1, sums.read)
    row = TierRow(hot, late_kv, perplexity, perplexity / plain - 1, sums.fetched / read, sums.late / read)
    return row if hot < 1 else replace(row, late_kv="")


def to_text(rows: list[TierRow]) -> str:
    head = ["hot", "late KV", "perplexity", "increase", "fetched", "late"]
    lines = [
        [
            "all" if row.hot == 1 else f"{row.hot:.1%}",
            row.late_kv,
            f"{row.perplexity:.4f}",
            f"{row.increase:+.3%}",
            f"{row.fetched:.2%}",
            f"{row.late:.3%}",
        ]
        for row in rows
    ]
    return align([head, *lines])


def to_json(rows: list[TierRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1)
