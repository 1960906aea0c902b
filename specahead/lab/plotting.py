"""Plots as PNG files, with titles in plain words. They need matplotlib, which nothing else loads."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def check_plots() -> None:
    """Raise ValueError where matplotlib is missing. To be called before what is to be plotted is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib, which is not installed: pip install 'specahead[lab]'")


def make_figure(*titles: str) -> tuple[Any, list[Any]]:
    """Return a figure and an axis for each title, side by side."""
    check_plots()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (6.4 * len(titles), 4.2)  # inches
    figure, (axes,) = pyplot.subplots(1, len(titles), figsize=size, squeeze=False, layout="constrained")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure, and forget it. Without a date and a version the same figures give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    from matplotlib import pyplot

    pyplot.close(figure)
    return path


def put_legend(axis: Any) -> None:
    """Put the legend to the right of an axis, where it hides nothing."""
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis at these values, in plain numbers; from 1,024 on in K."""
    axis.set_ticks(values, [f"{value / 1024:g}K" if value >= 1024 else f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)
