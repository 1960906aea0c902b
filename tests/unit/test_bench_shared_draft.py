"""What `bench shared-draft` compares, over services that are played."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specahead.cli.main import main
from specahead.lab.benchmarks import shared_draft
from specahead.lab.benchmarks.processes import Endpoints
from specahead.lab.benchmarks.serving import deployment
from specahead.lab.benchmarks.serving.breakdown import Breakdown, RoundParts
from specahead.lab.benchmarks.serving.clients import Load

COMMAND = ["bench", "shared-draft", "--shape", "2x100", "--tokens", "72", "--repeat", "1"]


class PlayedDeployment:
    """Two targets, and a draft for which a round waits for 2 of 10 ms, and 3 of 11 where both have sessions."""

    def __init__(self, start: Any, folder: Path, pair: deployment.Pair, *arguments: Any, timed: bool) -> None:
        self.targets = pair.names[:-1]
        assert timed and pair.names == ["target-1", "target-2", "draft"]

    def start(self) -> list[Endpoints]:
        return [Endpoints("first", ""), Endpoints("second", "")]

    def wait_until_prepared(self) -> None:
        pass

    def control(self, controls: Any) -> None:
        assert controls.attached

    def breakdown(self, run: str, target: str, draft: str) -> Any:
        assert run.endswith(target) and draft == "draft"
        more = 1.0 if run.startswith("target-1+target-2") else 0.0
        parts = RoundParts(wire=0.5, others_drafting=more, draft_host=0.5, draft_gpu=1.0, verify_gpu=8.0)
        return Breakdown(9, parts, target_idle=0.2, draft_idle=0.75, met=0.0)


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
    main([*COMMAND, "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    told = [tuple(row[name] for name in ("target", "others", "kept", "round", "for_draft", "lost")) for row in rows]
    assert told == [
        ("target-1", False, None, 10.0, 2.0, None),
        ("target-2", False, None, 10.0, 2.0, None),
        ("target-1", True, 0.9, 11.0, 3.0, 0.1),
        ("target-2", True, 0.9, 11.0, 3.0, 0.1),
    ]
    assert {row["draft_busy"] for row in rows} == {0.25}
    # No two sessions have the same prompt: neither target finds the other's in the draft.
    first = {address: load.first for address, load in loads}
    assert first == {"first": 0, "second": 2}
