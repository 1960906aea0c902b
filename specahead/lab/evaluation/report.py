"""What sparse verification costs, by method and budget: the rows of all tasks, and their table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specahead.lab.evaluation.rounds import HOT_ROUNDS, Variant, VariantSums
from specahead.lab.results import Columns, align, cells_of


@dataclass(frozen=True)
class QualityRow:
    """One variant over all cases of a task. Shares and rates lie in [0, 1]; None: does not apply.

    increase: of the perplexity over the dense one's. kv_read: share of the KV that rounds read, summaries included.
    acceptance: probability that speculative sampling keeps a drafted token. blocks: read a round, over all layers
    and KV heads. churn, churn4: share of them not read in the last round, in the last four. hot: for each of
    HOT_ROUNDS, the share of the KV that the last so many rounds read and the share of a round's blocks not in it.
    """

    task: str
    method: str
    budget: str
    perplexity: float
    increase: float | None
    recalled: int | None
    asked: int | None
    kv_read: float
    acceptance: float
    blocks: float
    churn: float
    churn4: float
    hot: tuple[tuple[float, float], ...]


def to_rows(task: str, variants: list[Variant], results: list[VariantSums]) -> list[QualityRow]:
    """The increase is over the first variant named dense, if there is one."""
    dense = next(
        (math.exp(s.nll / s.scored) for v, s in zip(variants, results, strict=True) if v.method == "dense"), None
    )
    return [_row(task, v, s, dense) for v, s in zip(variants, results, strict=True)]


def _row(task: str, variant: Variant, sums: VariantSums, dense: float | None) -> QualityRow:
    perplexity = math.exp(sums.nll / sums.scored)
    compared, later = max(1, sums.compared), max(1, sums.rounds - 1)
    fresh = [count / compared for count in sums.fresh]
    return QualityRow(
        task=task,
        method=variant.name,
        budget=variant.budget,
        perplexity=perplexity,
        increase=None if dense is None else perplexity / dense - 1,
        recalled=sums.recalled if sums.asked else None,
        asked=sums.asked or None,
        kv_read=sums.read / sums.present,
        acceptance=sums.accepted / sums.judged,
        blocks=sums.blocks / sums.rounds,
        churn=fresh[HOT_ROUNDS.index(1)],
        churn4=fresh[HOT_ROUNDS.index(4)],
        hot=tuple((share / later, new) for share, new in zip(sums.hot, fresh, strict=True)),
    )


COLUMNS: Columns[QualityRow] = {
    "method": lambda row: row.method,
    "budget": lambda row: row.budget,
    "perplexity": lambda row: f"{row.perplexity:.3f}",
    "increase": lambda row: "" if row.increase is None else f"{row.increase:+.2%}",
    "recall": lambda row: "" if row.asked is None else f"{row.recalled}/{row.asked}",
    "KV read": lambda row: f"{row.kv_read:.2%}",
    "acceptance": lambda row: f"{row.acceptance:.3f}",
    "blocks/round": lambda row: f"{row.blocks:.0f}",
    "churn 1": lambda row: f"{row.churn:.1%}",
    "churn 4": lambda row: f"{row.churn4:.1%}",
}


def to_text(rows: list[QualityRow], sums: Sequence[VariantSums] = ()) -> str:
    """Return the table. sums: those of the rows, the dense ones first, for two more columns."""
    table = cells_of(COLUMNS, rows)
    if sums:
        more = [["scored", "± increase"], *([str(each.scored), _error(each, sums[0])] for each in sums)]
        table = [left + right for left, right in zip(table, more, strict=True)]
    return align(table)


def of_variant(name: str, variant: Variant, sums: VariantSums, dense: VariantSums) -> str:
    """Return a line for a variant on the passage of a name, for a run that may be cut off."""
    _, row = to_rows("", [Variant("dense", "", variant.plan), variant], [dense, sums])
    return (
        f"{name} {row.method:<10} {row.budget:<5} perplexity {row.perplexity:.3f}, {COLUMNS['increase'](row)} ± "
        f"{_error(sums, dense)}; KV read {row.kv_read:.2%}; {sums.scored} tokens scored"
    )


def _error(sums: VariantSums, dense: VariantSums) -> str:
    """Return the standard error of the increase, from the differences of single tokens."""
    mean = (sums.nll - dense.nll) / sums.scored
    variance = max(0.0, sums.squares / sums.scored - mean**2) / max(1, sums.scored - 1)
    return f"{math.exp(mean) * math.sqrt(variance):.2%}"
