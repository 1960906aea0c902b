"""What the GPU benchmarks compute and print; that they measure right is seen on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specahead.cli.main import main
from specahead.config.speculation import KVCacheDtype
from specahead.lab.benchmarks import experts
from specahead.lab.benchmarks.flags import HELD
from specahead.lab.benchmarks.gpu_timing import require_gpu
from specahead.lab.benchmarks.random_models import random_experts
from specahead.lab.benchmarks.shapes import Shape
from specahead.lab.benchmarks.step import Bench, choosing_rows, draft_rows, target_rows


def run_once(work: Callable[[], object], repeats: int) -> float:
    work()
    return float(repeats)


@pytest.mark.parametrize("how", [{"kv_cache_dtype": "fp8"}, *({"quantization": each} for each in HELD)])
def test_each_step_and_round_that_is_measured_can_be_run(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, on a CPU, in a small shape: all that `bench step` times."""
    monkeypatch.setattr("specahead.lab.benchmarks.step.graph_milliseconds", run_once)
    shape = Shape(3, 128, 8, 2, 16, 128, 300)
    with torch.inference_mode():
        bench = Bench(shape, 1e9, 2, 512, "cpu", batch=2, **how)
        rows = target_rows(bench, 2, 512) + draft_rows(bench, 2, 512)
    assert len({row.what for row in rows}) == len(rows) == 11
    assert all(row.milliseconds == 2 and row.floor > 0 for row in rows)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_steps_of_a_model_that_chooses_blocks_can_be_run(kv: KVCacheDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specahead.lab.benchmarks.step.graph_milliseconds", run_once)
    chosen = {"block_size": 32, "topk": 4, "init_blocks": 1, "window_size": 64, "dense_len": 160}
    shape = Shape(2, 128, 8, 2, 16, 128, 300, sparse_config=chosen, model_type="minicpm")
    with torch.inference_mode():
        bench = Bench(shape, 1e9, 2, 512, "cpu", 2, kv_cache_dtype=kv)
        rows = choosing_rows(bench, 2, 512)
    assert [row.rival for row in rows] == [None, None, None, 2, 2, 2, 2]
    assert rows[3].floor < rows[2].floor
    assert "100% prefetched" in rows[5].what and "100% fetched" in rows[6].what  # in the first step


def test_all_parts_of_a_mixture_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the default cuts; the others fit the layers."""
    pytest.importorskip("triton")
    monkeypatch.setattr(experts, "graph_milliseconds", lambda work, repeats: work.args[0]() is not None)
    shape = Shape(1, 256, 2, 2, 16, 128, 300, experts=4, chosen=2)
    for how in ("fp8", "int4"):
        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
        case = experts.Case(torch.randn(3, 256).to(device, torch.float16), random_experts(shape, how, device, dtype))
        rows = experts.measure(case, how, 1e9, 2, tries=False)
        assert [row.what.split(",")[0] for row in rows] == [
            f"{how}: {each}" for each in ("all", "routing", "gate and up", "down")
        ]
        assert all(row.milliseconds == 1 / experts.TIMES and row.floor > 0 for row in rows)
        for gated, inputs in ((True, 256), (False, 128)):
            default, *others = experts.cuts_of(case, gated)
            assert default not in others
            assert all(inputs % cut.depth == 0 for cut in (default, *others))


@pytest.mark.parametrize("name", ["step", "offload", "experts"])
def test_without_a_gpu_there_is_one_line(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        main(["bench", name])
    with pytest.raises(ValueError, match="torch sees none"):
        require_gpu()


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="is for a CPU: a GPU's 16 bits may differ by ranks")
def test_steps_over_ranks_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU in a small shape, over one rank and over two, which give the same tokens."""
    main(["bench", "ranks", "--shape", "tiny", "--batch", "2", "--contexts", "300", "--repeats", "1"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["1", "2"]
    assert len(rows) == 4
    assert all(row.count("(2/2 alike)") == 2 for row in rows[1:])
