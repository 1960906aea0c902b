"""Rows of results: as a table on the terminal, as Markdown, as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specahead.lab.evaluation.rounds import HOT_ROUNDS, Variant, VariantSums


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


COLUMNS = (
    "method",
    "budget",
    "perplexity",
    "increase",
    "recall",
    "KV read",
    "acceptance",
    "blocks/round",
    "churn 1",
    "churn 4",
)


def cells(row: QualityRow) -> list[str]:
    return [
        row.method,
        row.budget,
        f"{row.perplexity:.3f}",
        "" if row.increase is None else f"{row.increase:+.2%}",
        "" if row.asked is None else f"{row.recalled}/{row.asked}",
        f"{row.kv_read:.2%}",
        f"{row.acceptance:.3f}",
        f"{row.blocks:.0f}",
        f"{row.churn:.1%}",
        f"{row.churn4:.1%}",
    ]


def to_text(rows: list[QualityRow], sums: Sequence[VariantSums] = ()) -> str:
    """Return the table. sums: those of the rows, the dense ones first, for two more columns."""
    table = [list(COLUMNS), *(cells(row) for row in rows)]
    if sums:
        more = [["scored", "± increase"], *([str(each.scored), _error(each, sums[0])] for each in sums)]
        table = [left + right for left, right in zip(table, more, strict=True)]
    return align(table)


def of_variant(name: str, variant: Variant, sums: VariantSums, dense: VariantSums) -> str:
    """Return a line for a variant on the passage of a name, for a run that may be cut off."""
    _, row = to_rows("", [Variant("dense", "", variant.plan), variant], [dense, sums])
    increase = "" if row.increase is None else f"{row.increase:+.2%}"
    return (
        f"{name} {row.method:<10} {row.budget:<5} perplexity {row.perplexity:.3f}, {increase} ± {_error(sums, dense)}; "
        f"KV read {row.kv_read:.2%}; {sums.scored} tokens scored"
    )


def _error(sums: VariantSums, dense: VariantSums) -> str:
    """Return the standard error of the increase, from the differences of single tokens."""
    mean = (sums.nll - dense.nll) / sums.scored
    variance = max(0.0, sums.squares / sums.scored - mean**2) / max(1, sums.scored - 1)
    return f"{math.exp(mean) * math.sqrt(variance):.2%}"


def to_markdown(rows: list[QualityRow]) -> str:
    return markdown_table([list(COLUMNS), *(cells(row) for row in rows)])


def align(table: list[list[str]], left: int = 2) -> str:
    """Lines of cells, the first of them the columns' names, of which `left` are flush left."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]

    def aligned(line: list[str]) -> str:
        pairs = list(zip(line, widths, strict=True))
        return "  ".join([cell.ljust(w) for cell, w in pairs[:left]] + [cell.rjust(w) for cell, w in pairs[left:]])

    return "\n".join(aligned(line) for line in table)


def markdown_table(table: list[list[str]], left: int = 2) -> str:
    """As `align`."""
    head, *lines = ["| " + " | ".join(line) + " |" for line in table]
    rule = "| --- " * left + "| ---: " * (len(table[0]) - left) + "|"
    return "\n".join([head, rule, *lines])


def to_json(rows: list[QualityRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1)
