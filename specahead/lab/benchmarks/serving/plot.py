"""A picture of the rows of `specahead bench serve`: speed over context and batch, and what a round waits for."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from specahead.lab.benchmarks.serving.breakdown import RoundParts
from specahead.lab.benchmarks.serving.rows import ServeRow
from specahead.lab.plotting import make_figure, plain_ticks, put_legend, save_figure


def plot_rows(rows: Sequence[ServeRow], path: Path) -> Path:
    """Draw the speed over contexts for each number of sessions, and rounds where they were broken down. Returns the
    PNG file.
    """
    batches = sorted({row.shape.sessions for row in rows})
    broken = [row for row in rows if row.breakdown is not None]
    titles = [f"Speed of {batch} session{'s' if batch > 1 else ''} at once" for batch in batches]
    titles += ["What a round waits for"] if broken else []
    figure, axes = make_figure(*titles, width=5.2, height=max(3.6, 0.4 * len(broken)))
    for batch, axis in zip(batches, axes, strict=False):
        _plot_speed(axis, [row for row in rows if row.shape.sessions == batch])
    put_legend(axes[len(batches) - 1])
    if broken:
        _plot_rounds(axes[-1], broken)
    return save_figure(figure, path)


def _plot_speed(axis: Any, rows: Sequence[ServeRow]) -> None:
    contexts = sorted({row.shape.context for row in rows})
    for way in dict.fromkeys(row.way for row in rows):
        found = sorted((row.shape.context, row.figures.tokens_a_second) for row in rows if row.way == way)
        axis.plot([context for context, _ in found], [rate for _, rate in found], "o-", label=str(way))
    axis.set(xscale="log", xlabel="tokens of context", ylabel="tokens a second, of all sessions", ylim=(0, None))
    plain_ticks(axis.xaxis, contexts)


def _plot_rounds(axis: Any, rows: Sequence[ServeRow]) -> None:
    labels, left = [f"{row.shape}: {row.way}" for row in rows], [0.0] * len(rows)
    for part in fields(RoundParts):
        sizes = [getattr(row.breakdown.parts, part.name) if row.breakdown else 0.0 for row in rows]
        axis.barh(labels, sizes, left=left, label=part.name.replace("_", " "))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axis.set(xlabel="milliseconds of a mean round")
    axis.invert_yaxis()
    put_legend(axis)
