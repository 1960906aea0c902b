"""What the GPU benchmarks compute and print; that they measure right is seen on a GPU."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import serve
from benchmarks.gpu_timing import Head, TimedRow, report, require_gpu
from benchmarks.shapes import SHAPES, Shape, read_shape_of
from cli.main import main


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


@pytest.mark.parametrize("name", ["kernels", "step", "offload"])
def test_without_a_gpu_there_is_one_line(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        main(["bench", name])
    with pytest.raises(ValueError, match="torch sees none"):
        require_gpu()


def test_a_model_folder_has_the_shape_and_a_tokenizer(tmp_path: Path) -> None:
    serve.write_model(tmp_path / "target", "tiny", 4096, 700)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "target")
    assert (config.num_hidden_layers, config.head_dim, config.max_position_embeddings) == (2, 16, 700)
    assert (tmp_path / "target" / "tokenizer.json").exists()
    assert not list((tmp_path / "target").glob("*.safetensors"))


def test_the_services_are_measured_without_and_with_a_draft(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    sizes = ["--sessions", "2", "--context", "200", "--tokens", "150", "--read-share", "1", "--no-ahead"]
    main(["bench", "serve", "--target-shape", "tiny", "--draft-shape", "tiny", *sizes, "--json", str(file)])
    rows = {row["what"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"no draft, dense", "draft, dense verify", "draft, sparse verify"}
    assert rows["no draft, dense"]["tokens_a_round"] == 1
    assert 1 < rows["draft, dense verify"]["tokens_a_round"] <= 5
    assert rows["draft, sparse verify"]["kv_read"] < 1
    assert all(row["tokens_a_second"] > 0 for row in rows.values())
    assert all(row["kv_fetched"] == 0 for row in rows.values())


def test_the_services_are_measured_over_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 44 pages about 30 lie on the device."""
    file = tmp_path / "serve.json"
    sizes = ["--sessions", "2", "--context", "200", "--tokens", "150", "--read-share", "1", "--no-ahead"]
    memory = ["--host-kv-memory", "0.001", "--kv-memory", "0.0005"]
    shapes = ["--target-shape", "tiny", "--draft-shape", "tiny"]
    main(["bench", "serve", *shapes, *sizes, *memory, "--sparse-only", "--json", str(file)])
    content = json.loads(file.read_text())
    assert content["command"].endswith("--no-ahead " + " ".join([*memory, "--sparse-only"]))
    (row,) = content["rows"]
    assert row["what"] == "draft, sparse verify" and row["tokens_a_second"] > 0
    assert row["kv_fetched"] > 0
    assert "fetched" in capsys.readouterr().out


def test_a_memory_of_nothing_is_refused() -> None:
    with pytest.raises(SystemExit, match="must be positive; leave out what is not wanted"):
        main(["bench", "serve", "--kv-memory", "0"])
