"""The codec benchmark: traces are what they say, sizes are the codec's. No claims about time."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from specahead.cli.main import main
from specahead.lab.benchmarks import codec, selection_trace
from specahead.lab.benchmarks.selection_trace import Trace, churn_of, load_traces, save_traces
from specahead.models import PLAN
from specahead.sparsity.plan import load_plan
from specahead.sparsity.selection import BlockSelection


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


def test_sticky_choices_change_less_and_lose_little() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(4, 100, generator=generator)
    scores = [base + 0.2 * torch.rand(4, 100, generator=generator) for _ in range(8)]

    def churn(chosen: list[torch.Tensor]) -> float:
        return churn_of([BlockSelection.from_matrix(c.numpy()) for c in chosen], 1)

    plain, nothing = selection_trace._choose(scores, 0.0)
    sticky, lost = selection_trace._choose(scores, 0.3)
    assert all(int(c.sum()) == 40 for c in plain + sticky)
    assert churn(sticky) < churn(plain)
    assert nothing == 0 < lost < 0.1


def test_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: three passages of the bundled draft's 16 heads and of 40 target heads."""
    for name, value in (("PROMPT", 236), ("BLOCKS", 10), ("SEGMENTS", 1), ("ROWS", 48)):
        monkeypatch.setattr(selection_trace, name, value)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"It was the year {1800 + i} and nothing had changed." for i in range(90)))
    selection_trace.record_traces([str(text)], tmp_path / "t.npz")
    traces, about = load_traces(tmp_path / "t.npz")
    assert [trace.name for trace in traces] == ["ahead", "ahead sticky", "draft heads"]
    assert about["plan"] == load_plan(PLAN).hash
    for trace in traces:
        assert trace.history.shape == (48, 10)
        assert len(trace.selections()) == selection_trace.ROUNDS
    heads = traces[2].selections()
    assert all((r.matrix().sum(1) == 1).all() for r in heads)
    text.write_text("a few words")
    with pytest.raises(ValueError, match="too short"):
        selection_trace.record_traces([str(text)], tmp_path / "t.npz")
