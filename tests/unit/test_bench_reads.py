"""Recorded reads: they come from the services, are stored as they were, and are stretched as they say."""

from pathlib import Path

import numpy as np
import pytest

from specahead.lab.benchmarks.read_trace import READS, ReadTrace, about_reads, churn_of, load_reads, save_reads
from specahead.models import PLAN
from specahead.sparsity.plan import load_plan

HEADS, WIDTH = 40, 250


def trace_of(history: np.ndarray, rounds: int = 7) -> ReadTrace:
    return ReadTrace("1/9", 0.1, 0.11, 0.2, 0.05, history, rounds)


def test_traces_come_back_from_their_file(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    traces = [trace_of(random.integers(0, 2**7, (3, 4, 5), dtype=np.uint32)) for _ in range(1)]
    save_reads(traces, tmp_path / "deeper" / "t.npz", {"command": "x"})
    (again,) = load_reads(tmp_path / "deeper" / "t.npz")
    assert about_reads(tmp_path / "deeper" / "t.npz") == {"command": "x"}
    for name, value in vars(traces[0]).items():
        assert np.array_equal(getattr(again, name), value), name
    assert again.rounds == 7


def test_the_bundled_file() -> None:
    """Real reads at four shares, each with passages enough for a row at 100K, and where they come from."""
    assert READS.stat().st_size < 400_000
    about, plan = about_reads(), load_plan(PLAN)
    assert about["command"].startswith("python -m specahead.lab.benchmarks.read_trace ")
    assert not set(about["books"].split(", ")) & set(plan.provenance["files"])
    traces = load_reads()
    assert [trace.name for trace in traces] == ["1/8", "1/10", "1/16", "1/32"]
    for trace in traces:
        passages = len(trace.history)
        assert trace.history.shape == (passages, HEADS, WIDTH) and passages >= 25 and trace.rounds >= 10
        assert trace.history.max() >> trace.rounds == 0 < trace.history.max() >> trace.rounds - 1
        assert trace.selected == pytest.approx(1 / int(trace.name[2:]), rel=0.07)
        stretched = trace.selections()
        selected = np.mean([selection.matrix().mean() for selection in stretched[4:]])
        assert selected == pytest.approx(trace.selected, rel=0.1)
        for back, churn in ((1, trace.churn), (4, trace.churn4)):
            assert churn_of(stretched, back) == pytest.approx(churn, rel=0.1)
        assert len({passage.tobytes() for passage in trace.history}) == passages
