"""A picture of the rows of `specahead bench serve`: tokens a second, and what a round waits for."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from specahead.lab.benchmarks.serving.breakdown import RoundParts
from specahead.lab.benchmarks.serving.rows import ServeRow
from specahead.lab.evaluation.plots import make_figure, save_figure


def plot_rows(rows: Sequence[ServeRow], path: Path) -> Path:
    """Draw a bar for each row, and beside it its round, where that was broken down. Returns the PNG file."""
    figure, (rates, rounds) = make_figure(2, height=max(2.0, 0.5 * len(rows)))
    labels = [f"{row.shape}: {row.way}" for row in rows]
    rates.barh(labels, [row.figures.tokens_a_second for row in rows])
    rates.set(xlabel="tokens a second, all sessions")
    left = [0.0] * len(rows)
    for part in fields(RoundParts):
        sizes = [getattr(row.breakdown.parts, part.name) if row.breakdown else 0.0 for row in rows]
        rounds.barh(labels, sizes, left=left, label=part.name.replace("_", " "))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    rounds.set(xlabel="a round, ms", yticklabels=[])
    rounds.legend(fontsize=7)
    for axis in (rates, rounds):
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
    return save_figure(figure, path)
