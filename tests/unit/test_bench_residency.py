"""The prediction for a hot buffer: counts are those of the selections, and who shares slots matters."""

import json
from pathlib import Path

import numpy as np
import pytest

from specahead.cli.main import main
from specahead.lab.benchmarks.residency import SETTLED, replay


def rounds_of(rows: int, blocks: int, shares: list[float], count: int = 8) -> list[np.ndarray]:
    """Random selections, a share of each row's blocks."""
    random = np.random.default_rng(rows)
    return [random.random((rows, blocks)) < np.array(shares)[:, None] for _ in range(count)]


@pytest.mark.parametrize("pool", [1, 2, 4])
def test_with_room_for_all_only_what_is_new_is_fetched(pool: int) -> None:
    rounds = rounds_of(4, 60, [0.1, 0.2, 0.3, 0.05])
    seen, new = np.zeros((4, 60), bool), []
    for chosen in rounds:
        new.append(int((chosen & ~seen).sum()))
        seen |= chosen
    selected = sum(int(chosen.sum()) for chosen in rounds[SETTLED:])
    assert replay(rounds, pool, 1.0) == (sum(new[SETTLED:]), 0, selected)


def test_a_head_that_selects_much_has_no_slots_unless_heads_share_them() -> None:
    rounds = rounds_of(4, 100, [0.6, 0.02, 0.02, 0.02])
    selected = sum(int(chosen.sum()) for chosen in rounds[SETTLED:])
    alone, shared = (replay(rounds, pool, 0.25) for pool in (1, 4))
    assert alone[1] > 0.3 * selected and shared[1] == 0
    assert sum(shared[:2]) < sum(alone[:2])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    main(["bench", "residency", "--hot", "0.25", "--layers", "1", "--pools", "layer", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["trace"] for row in rows] == ["ahead", "ahead sticky", "draft heads"]
    assert all(0 < row["missed"] < 0.2 and row["unplaced"] == 0 for row in rows)
    for row in rows:
        assert row["link_ms"] == pytest.approx(row["megabytes"] / 53)
    assert "draft heads" in capsys.readouterr().out


def test_reads_of_the_target_instead(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    flags = ["--hot", "0.25", "--layers", "1", "--pools", "layer", "--json", str(file)]
    main(["bench", "residency", "--traces", "reads", *flags])
    content = json.loads(file.read_text())
    assert [row["trace"] for row in content["rows"]] == ["1/8", "1/10", "1/16", "1/32"]
    assert all(0 < row["missed"] < 0.2 and row["unplaced"] == 0 for row in content["rows"])
    assert "--traces reads" in content["command"] and "bench reads --record" in content["traces"]


def test_what_is_refused() -> None:
    with pytest.raises(SystemExit, match="shares of slots"):
        main(["bench", "residency", "--hot", "1.5"])
    with pytest.raises(SystemExit, match="layers must lie"):
        main(["bench", "residency", "--layers", "33"])
