"""Plots: what is missing for them is said at once."""

import pytest

from specahead.cli.main import main
from specahead.lab import plotting


def test_without_matplotlib_a_command_ends_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"plots need matplotlib.*pip install 'specahead\[lab\]'"):
        main(["bench", "agents", "--plot", "agents.png"])
