"""The benchmark of prompt lookup dictates its texts, and says what was proposed and accepted. No claims about time."""

import json
from pathlib import Path

import pytest

from specahead.cli.main import main

SIZES = ["--context", "120", "--tokens", "40", "--repeats", "1"]


@pytest.mark.long
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    main(["bench", "copy", "--sessions", "2", *SIZES, "--draft", "--json", str(file)])
    rows = {(row["text"].split()[0], row["proposer"]): row for row in json.loads(file.read_text())["rows"]}
    copied, first = rows["copied", "lookup"], rows["copied", "lookup, draft"]
    assert (copied["rounds"], copied["proposed"], copied["accepted"]) == (8, 1, 32)
    # A round or two with the draft, until 16 tokens match; then rounds of 15 proposed tokens.
    assert first["rounds"] <= 8 < rows["copied", "draft"]["rounds"] and first["accepted"] >= 32
    for text, proposer in rows:
        row = rows[text, proposer]
        assert row["sessions"] == 2 and row["rounds"] + row["accepted"] == 40
        assert row["faster"] == pytest.approx(rows[text, "none"]["milliseconds"] / row["milliseconds"])
        assert proposer != "none" or row["proposed"] == 0
        assert proposer != "lookup" or text == "copied" or row["proposed"] < 0.1
    assert len(rows) == 12
    assert "--sessions 2 --context 120 --tokens 40 --gamma 4 --repeats 1 --draft\n" in capsys.readouterr().out
