"""Steps over tiers give what steps over resident KV give, however pages are fetched; and the benchmark's rehearsal."""

import json
from pathlib import Path

import pytest
import torch

from specahead.cli.main import main
from specahead.lab.benchmarks.offload_steps import SETTLED


@pytest.mark.long
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_rehearsal(kv_cache_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    sizes = ["--contexts", "512", "--batches", "2", "--hot", "0.5", "--passes", "1", "--shares", "0.1", "0.0625"]
    how = "--kv-cache-dtype", kv_cache_dtype
    main(["bench", "offload", "--shape", "tiny", *sizes, *how, "--json", str(file)])
    content = json.loads(file.read_text())
    ways = [way for way in ("resident", "in step", "on demand") for _ in range(2)]
    assert [(row["way"], row["share"]) for row in content["rows"]] == [
        (way, share) for way, share in zip(ways, [0.1, 0.0625] * 3, strict=True)
    ]
    in_step, on_demand = content["rows"][2:6:2]
    assert 0 < in_step["pages_fetched"] < in_step["pages_read"]
    number = 1 if kv_cache_dtype == "fp8" else 2 if torch.cuda.is_available() else 4  # bytes
    assert in_step["bytes_fetched"] == pytest.approx(in_step["pages_fetched"] * 2 * 16 * 16 * number)
    for name in ("pages_read", "pages_fetched", "pages_refused"):
        assert in_step[name] == on_demand[name]
    for row in content["rows"][2:]:
        assert row["check"] == {"rounds": row["check"]["rounds"], "same": True, "difference": 0.0}
        assert row["check"]["rounds"] > SETTLED
    assert in_step["bound"] >= in_step["resident"] == content["rows"][0]["milliseconds"]
    if not torch.cuda.is_available():
        assert "a rehearsal" in capsys.readouterr().out
