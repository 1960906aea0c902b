"""The codec benchmark: traces are what they say, sizes are the codec's. No claims about time."""

import json
from pathlib import Path

import numpy as np
import pytest

from specahead.cli.main import main
from specahead.lab.benchmarks import codec
from specahead.lab.benchmarks.selection_trace import Trace, load_traces, save_traces


def test_the_bundled_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The whole benchmark, each thing once. What the default method announces is within the goal on average."""
    file = tmp_path / "rows.json"
    main(["bench", "codec", "--repeats", "1", "--json", str(file)])
    content = json.loads(file.read_text())
    rows = {(row["trace"], row["coding"]): row for row in content["rows"]}
    assert {trace for trace, _ in rows} >= {"ahead", "ahead sticky", "draft heads", "ahead, recorded"}
    for trace in ("ahead", "ahead sticky", "draft heads"):
        ours, alone = rows[trace, "announcement"], rows[trace, "no reference"]
        assert (ours["heads"], ours["blocks"]) == (256, 6250)
        assert ours["mean"] < alone["mean"] <= alone["most"] < 2 * codec.GOAL_BYTES
    assert rows["ahead sticky", "announcement"]["mean"] < rows["ahead", "announcement"]["mean"] <= codec.GOAL_BYTES
    for churn in content["churn"]:
        assert churn["selected"] == pytest.approx(0.1, abs=0.001)
        assert churn["churn"] == pytest.approx(churn["recorded_churn"], abs=0.01)
        assert churn["churn4"] == pytest.approx(churn["recorded_churn4"], abs=0.01)
    printed = capsys.readouterr().out
    assert "ahead sticky" in printed and "256 x 6250" in printed


def test_traces_come_back_from_their_file(tmp_path: Path) -> None:
    history = np.random.default_rng(0).integers(0, 1024, (256, 6250)).astype(np.uint16)
    trace = Trace("some name", 40, 0.25, 0.125, 0.5, history)
    save_traces([trace], tmp_path / "deeper" / "t.npz", {"command": "x"})
    (again,), about = load_traces(tmp_path / "deeper" / "t.npz")
    assert about == {"command": "x"}
    assert np.array_equal(again.history, history)
    assert (again.name, again.heads, again.churn) == ("some name", 40, 0.25)
    rounds = again.selections()
    assert np.array_equal(rounds[3].matrix(), history >> 3 & 1)
    parts = list(again.passages(7))
    assert np.array_equal(parts[0][2].matrix(), history[:40, :250] >> 2 & 1)
    assert len({part[0].words.tobytes() for part in parts}) == 7
