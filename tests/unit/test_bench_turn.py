"""The benchmark of a chat's next turn, as small as can be. No claims about time."""

import json
from pathlib import Path

import pytest

from specahead.cli.main import main


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    main(["bench", "turn", "--messages", "2", "4", "--repeats", "2", "--json", str(file)])
    rows = json.loads(file.read_text())
    assert rows[0]["tokens"] < rows[1]["tokens"]
    assert all(value > 0 for row in rows for value in row.values())
    assert "encoded by pieces" in capsys.readouterr().out
