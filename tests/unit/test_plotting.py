"""Plots: what is missing for them is said at once, and speed is drawn over contexts for each number of sessions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specahead.cli.main import main
from specahead.lab import plotting
from specahead.lab.benchmarks.serving import plot
from specahead.lab.benchmarks.serving.breakdown import Breakdown, RoundParts
from specahead.lab.benchmarks.serving.rows import ServeRow, Shape, Way


def test_without_matplotlib_a_command_ends_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"plots need matplotlib.*pip install 'specahead\[lab\]'"):
        main(["bench", "serve", "--plot", "serve.png"])


def test_speed_is_drawn_over_contexts_for_each_number_of_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds are drawn beside it where they were broken down."""
    kept: list[Any] = []
    monkeypatch.setattr(
        plot, "save_figure", lambda figure, path: kept.append(figure) or plotting.save_figure(figure, path)
    )
    rows = [
        ServeRow(
            Shape(sessions, context),
            Way(mode),
            [1.0],
            SimpleNamespace(tokens_a_second=rate),  # type: ignore[arg-type]
            breakdown=Breakdown(9, RoundParts(verify_gpu=3.0), 0.1, 0.2, 0.9) if sessions == 8 else None,
        )
        for sessions in (8, 1)
        for context, rate in ((32768, 50.0), (8192, 90.0))
        for mode in ("none", "exact")
    ]
    assert plot.plot_rows(rows, tmp_path / "serve.png").stat().st_size > 0
    (figure,) = kept
    one, eight, rounds = figure.axes
    titles = [axis.get_title(loc="left") for axis in (one, eight, rounds)]
    assert titles == ["Speed of 1 session at once", "Speed of 8 sessions at once", "What a round waits for"]
    for axis in (one, eight):
        assert [line.get_label() for line in axis.get_lines()] == ["no draft", "exact"]
        assert all(list(line.get_ydata()) == [90, 50] for line in axis.get_lines())
        assert [text.get_text() for text in axis.get_xticklabels()] == ["8K", "32K"]
    assert len(rounds.get_yticklabels()) == 4
