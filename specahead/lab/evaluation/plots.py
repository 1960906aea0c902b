"""Plots as PNG files: quality against what is read, churn against the hot buffer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specahead.lab.evaluation.report import QualityRow


def make_figure(columns: int = 1, width: float = 6.4, height: float = 4.2) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side; width and height: inches of each. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"plots need matplotlib ({error}): pip install 'specahead[lab]'") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width * columns, height), squeeze=False)
    return figure, list(axes[0])


def save_figure(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and a version the same figures give the same file.
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    from matplotlib import pyplot

    pyplot.close(figure)
    return path


def _by_method(rows: Sequence[QualityRow]) -> dict[str, list[QualityRow]]:
    methods: dict[str, list[QualityRow]] = {}
    for row in rows:
        if row.method != "dense":
            methods.setdefault(row.method, []).append(row)
    return {name: sorted(found, key=lambda row: row.kv_read) for name, found in methods.items()}


def plot_quality(rows: Sequence[QualityRow], path: Path) -> Path:
    """Relative increase of the perplexity against the share of the KV read, a line a method."""
    figure, (axis,) = make_figure()
    for name, found in _by_method(rows).items():
        wide = 2.5 if name == "ahead" else 1.2
        increases = [100 * (r.increase or 0) for r in found]
        axis.plot([100 * r.kv_read for r in found], increases, "o-", ms=3, lw=wide, label=name)
    axis.set(xscale="log", xlabel="KV read, %, summaries included", ylabel="increase of perplexity, %")
    axis.set_yscale("symlog", linthresh=1)
    _plain_ticks(axis.xaxis, (3, 6, 12, 25, 50))
    _plain_ticks(axis.yaxis, (-1, 0, 1, 2, 5, 10, 20))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return save_figure(figure, path)


def plot_churn(rows: Sequence[QualityRow], path: Path) -> Path:
    """What of a round's blocks is not in a hot buffer of what the last rounds read, against the buffer's size."""
    figure, (axis,) = make_figure()
    for row in rows:
        if row.method == "dense":
            continue
        sizes, fresh = zip(*row.hot, strict=True)
        axis.plot([100 * s for s in sizes], [100 * f for f in fresh], "o-", ms=3, label=f"{row.method} {row.budget}")
    axis.set(xlabel="hot buffer, % of the KV (last 1, 2, 4 … 32 rounds)", ylabel="blocks of a round not in it, %")
    axis.set(xscale="log", yscale="log")
    _plain_ticks(axis.xaxis, (6, 10, 20, 40))
    _plain_ticks(axis.yaxis, (0.5, 1, 2, 5, 10, 20, 40))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return save_figure(figure, path)


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis at these values, in plain numbers."""
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)
