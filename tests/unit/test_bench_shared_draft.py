"""What `bench shared-draft` compares, over services that are played."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import shared_draft
from benchmarks.serving import deployment
from benchmarks.serving.clients import Load
from cli.main import main

COMMAND = ["bench", "shared-draft", "--shape", "2x100", "--tokens", "40", "--repeat", "1"]


class PlayedDeployment:
    """Two targets, and as many drafts as are asked for."""

    def __init__(self, *arguments: Any) -> None:
        self.targets, drafts = ["target-1", "target-2"], arguments[-1]
        self.drafts = ["draft"] if drafts == 1 else ["draft-1", "draft-2"]
        self.gpus = arguments[2].gpus

    def start(self, with_draft: bool) -> list[str]:
        assert with_draft
        return ["first", "second"]

    def control(self, controls: Any) -> None:
        assert controls.attached

    def breakdown(self, run: str, target: str, draft: str) -> Any:
        assert run.endswith(target) and draft in self.drafts
        return SimpleNamespace(draft_idle=0.75)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Load]]:
    """Each endpoint gives 100 tokens a second, and 90 while both are loaded. Returned: what was asked of them."""
    asked: list[tuple[str, Load]] = []

    def run_clients(address: str, load: Load) -> Any:
        asked.append((address, load))
        rate = 90.0 if load.name.startswith("target-1+target-2") else 100.0
        return SimpleNamespace(name=load.name, tokens_a_second=rate, plain_share=0.0)

    monkeypatch.setattr(shared_draft, "run_clients", run_clients)
    monkeypatch.setattr(shared_draft, "Deployment", PlayedDeployment)
    return asked


def test_both_at_once_are_compared_with_each_alone(loads: list[tuple[str, Load]], tmp_path: Path) -> None:
    main([*COMMAND, "--two-drafts", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    told = [(row["target"], row["drafts"], row["others"], row["kept"], row["draft_busy"]) for row in rows]
    assert told == [
        ("target-1", 1, False, None, 0.25),
        ("target-2", 1, False, None, 0.25),
        ("target-1", 1, True, 0.9, 0.25),
        ("target-2", 1, True, 0.9, 0.25),
        ("target-1", 2, True, 0.9, 0.25),
        ("target-2", 2, True, 0.9, 0.25),
    ]
    # No two sessions have the same prompt: neither target finds the other's in the draft.
    first = {address: load.first for address, load in loads}
    assert first == {"first": 0, "second": 2}


def test_what_cannot_be_measured_is_refused(loads: list[tuple[str, Load]]) -> None:
    for flags in (
        ["--tokens", "39"],
        ["--repeat", "0"],
        ["--gpus", "0", "1"],
        ["--two-drafts", "--gpus", "0", "1", "2"],
    ):
        with pytest.raises(SystemExit, match="error: --"):
            main([*COMMAND, *flags])
    assert not loads


def test_each_of_two_drafts_has_its_device_and_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[tuple[str, ...], int | None]] = []

    def start(*command: str, stdout: int, gpu: int | None) -> Any:
        started.append((command, gpu))

    monkeypatch.setattr(deployment, "wait_for_service", lambda process, seconds: None)
    monkeypatch.setattr(deployment, "start_endpoints", lambda start, *flags, seconds: flags[-1])
    devices = {"target-1": 5, "target-2": 6, "draft-1": 5, "draft-2": 6}
    pair, room = deployment.Pair("tiny", "tiny", 4, 0.8, 0.1, 1, gpus=devices), deployment.Room(2, 200, 100)
    both = deployment.Deployment(start, tmp_path, pair, room, False, False, lambda: 1.0, 2, 2)
    addresses = both.start(with_draft=True)
    assert [(command[1], gpu) for command, gpu in started] == [("target", 5), ("target", 6), ("draft", 5), ("draft", 6)]
    assert [command[command.index("--target") + 1] for command, _ in started[2:]] == addresses
    assert {command[command.index("--max-sessions") + 1] for command, _ in started} == {"2"}
