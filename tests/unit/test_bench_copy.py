"""The benchmark of prompt lookup dictates its texts, and says what was proposed and accepted. No claims about time."""

import json
from pathlib import Path

import pytest

from cli.main import main

SIZES = ["--context", "120", "--tokens", "40", "--repeats", "1"]


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    main(["bench", "copy", "--sessions", "2", *SIZES, "--json", str(file)])
    copied, new, noise = json.loads(file.read_text())["rows"]
    assert (copied["rounds"], copied["proposed"], copied["accepted"]) == (8, 1, 32)
    for row in (new, noise):
        assert row["rounds"] + row["accepted"] == 40 and row["proposed"] < 0.1
    assert all(
        row["sessions"] == 2 and row["speedup"] == row["plain"] / row["looked_up"] for row in (copied, new, noise)
    )
    assert "--sessions 2 --context 120 --tokens 40" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [["--context", "5000"], ["--context", "60", "--tokens", "40"]])
def test_texts_that_are_too_short(sizes: list[str]) -> None:
    with pytest.raises(SystemExit, match="their sum must be in the text"):
        main(["bench", "copy", *sizes])
