"""What the GPU benchmarks compute and print; that they measure right is seen on a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from specahead.cli.main import main
from specahead.lab.benchmarks.gpu_timing import Head, TimedRow, report, require_gpu
from specahead.lab.benchmarks.shapes import SHAPES, Shape, read_shape_of
from specahead.lab.benchmarks.step import Bench, draft_rows, target_rows


def test_a_shape_is_read_from_a_config(tmp_path: Path) -> None:
    transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=99
    ).save_pretrained(tmp_path)
    assert read_shape_of(str(tmp_path)) == Shape(3, 64, 4, 2, 16, 11008, 99)
    assert read_shape_of("8b") is SHAPES["8b"]


def test_a_row_is_set_against_its_floor_and_its_rival(tmp_path: Path) -> None:
    head = Head("a machine", "2026-01-02", "specahead bench step", 4e12)
    rows = [TimedRow("dense", 2.0, 1.0, None), TimedRow("sparse", 0.5, 0.4, None).against(2.0).named("target: ")]
    lines = report(head, rows, "a note").splitlines()
    assert "4.00 TB/s" in lines[3]
    assert lines[5].split() == ["dense", "2.0000", "ms", "1.0000", "ms", "2.00", "2.000"]
    assert lines[6].split() == [
        *("target:", "sparse", "0.5000", "ms", "0.4000", "ms"),
        *("1.25", "3.200", "2.0000", "ms", "4.00"),
    ]
    assert lines[-1] == "a note"
    head.write(str(tmp_path / "out.json"), rows)
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["command"] == "specahead bench step"
    assert content["rows"][1] == {
        "what": "target: sparse",
        "milliseconds": 0.5,
        "floor": 0.4,
        "rival": 2.0,
        "bandwidth": None,
    }


def test_each_step_and_round_that_is_measured_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, on a CPU, in a small shape: all that `bench step` times."""

    def run_once(work: Callable[[], object], repeats: int) -> float:
        work()
        return float(repeats)

    monkeypatch.setattr("specahead.lab.benchmarks.step.graph_milliseconds", run_once)
    shape = Shape(3, 64, 4, 2, 16, 128, 300)
    with torch.inference_mode():
        bench = Bench(shape, 1e9, 2, 512, "cpu", batch=2)
        rows = target_rows(bench, 2, 512) + draft_rows(bench, 2, 512)
    assert len({row.what for row in rows}) == len(rows) == 11
    assert all(row.milliseconds == 2 and row.floor > 0 for row in rows)


@pytest.mark.parametrize("name", ["kernels", "step", "offload"])
def test_without_a_gpu_there_is_one_line(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        main(["bench", name])
    with pytest.raises(ValueError, match="torch sees none"):
        require_gpu()
