"""The stack benchmark runs, says what it measured, and leaves no process behind. No claims about time."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specahead.cli.main import main
from specahead.lab.benchmarks import stack

Process = subprocess.Popen[str]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes that the benchmark starts."""
    processes: list[Process] = []
    popen = subprocess.Popen

    def record(command: list[str], **options: Any) -> Process:
        processes.append(popen(command, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", record)
    return processes


@pytest.mark.long
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[Process]) -> None:
    file = tmp_path / "stack.json"
    main(["bench", "stack", "--sessions", "2", "--tokens", "40", "--json", str(file)])
    content = json.loads(file.read_text())
    assert [row["exactness"] for row in content["rows"]] == ["exact", "approximate"]
    assert {"machine", "date", "command"} <= set(content)
    for row in (stack.StackRow(**row) for row in content["rows"]):
        assert row.sessions == 2 and row.rounds > 0 and row.messages >= row.rounds
        assert 0 < row.round_p50_ms <= row.round_p95_ms and row.session_round_ms > 0
        assert 1 < row.tokens_a_round < 5  # some proposals were accepted, and some not
        assert set(row.cpu_ms) == set(stack.SIDES) and min(row.cpu_ms.values()) >= 0
        assert (row.announced_bytes_a_round > 0) == (row.exactness == "approximate")
    printed = capsys.readouterr().out
    assert "--sessions 2 --tokens 40 --gamma 4\n" in printed and "approximate" in printed
    assert len(started) == 3
    assert all(process.returncode == 0 for process in started)
