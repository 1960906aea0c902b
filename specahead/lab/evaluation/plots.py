"""Plots of rows of quality: what reading less costs, and what a cache of recent blocks misses."""

from collections.abc import Sequence
from pathlib import Path

from specahead.lab.evaluation.report import QualityRow
from specahead.lab.plotting import make_figure, plain_ticks, put_legend, save_figure

_OURS = {"color": "#0a5fa8", "lw": 3, "ms": 6, "zorder": 3}


def plot_quality(rows: Sequence[QualityRow], path: Path) -> Path:
    """Plot the increase of the perplexity over the share of the KV read, a line for each method."""
    figure, (axis,) = make_figure("Reading less of the KV costs quality: lower is better")
    methods = dict.fromkeys(row.method for row in rows if row.method != "dense")
    for name in methods:
        found = sorted((row for row in rows if row.method == name), key=lambda row: row.kv_read)
        increases = [100 * (row.increase or 0) for row in found]
        look = _OURS if name == "ahead" else {"lw": 1.2, "ms": 3}
        axis.plot([100 * row.kv_read for row in found], increases, "o-", label=name, **look)
    axis.set(xscale="log", xlabel="share of the KV that is read, %", ylabel="increase of the perplexity, %")
    axis.set_yscale("symlog", linthresh=1)
    axis.axhline(0, color="black", lw=0.8)
    plain_ticks(axis.xaxis, (3, 6, 12, 25, 50))
    plain_ticks(axis.yaxis, (-1, 0, 1, 2, 5, 10, 20))
    put_legend(axis)
    return save_figure(figure, path)


def plot_churn(rows: Sequence[QualityRow], path: Path) -> Path:
    """Plot the share of a round's blocks that the last rounds did not read, over the share of the KV that they read."""
    figure, (axis,) = make_figure("What a cache of recently read blocks misses: lower is better")
    for row in rows:
        if row.method == "dense":
            continue
        sizes, fresh = zip(*row.hot, strict=True)
        look = _OURS if row.method == "ahead" else {"lw": 1.2, "ms": 3}
        label = f"{row.method}, {row.budget}"
        axis.plot([100 * size for size in sizes], [100 * share for share in fresh], "o-", label=label, **look)
    axis.set(xscale="log", yscale="log", ylabel="blocks of a round that are not in it, %")
    axis.set(xlabel="size of the cache, % of the KV; dots: all that the last 1, 2, 4 … 32 rounds read")
    plain_ticks(axis.xaxis, (6, 10, 20, 40))
    plain_ticks(axis.yaxis, (0.5, 1, 2, 5, 10, 20, 40))
    put_legend(axis)
    return save_figure(figure, path)
