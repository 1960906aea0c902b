"""Recorded reads: they come from the services, are stored as they were, and are stretched as they say."""

from pathlib import Path

import numpy as np
import pytest

from specahead.lab.benchmarks import read_trace
from specahead.lab.benchmarks.read_trace import (
    BLOCKS_AT_100K,
    MOST_BLOCKS,
    READS,
    ReadTrace,
    about_reads,
    load_reads,
    save_reads,
)
from specahead.lab.benchmarks.selection_trace import ROWS, churn_of
from specahead.models import PLAN
from specahead.sparsity.plan import load_plan

HEADS, WIDTH = 40, 250


def trace_of(history: np.ndarray, rounds: int = 7) -> ReadTrace:
    shape = (len(history), rounds)
    accepted = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) % 5
    return ReadTrace("1/9", 0.1, 0.11, 0.2, 0.05, history, accepted, accepted == 4)


@pytest.fixture(scope="module")
def numbered() -> ReadTrace:
    """30 passages of one block: bit t of (passage, head) is bit t of their number."""
    number = np.arange(30)[:, None] * 64 + np.arange(HEADS)
    return trace_of(number[..., None].astype(np.uint32), rounds=11)


def placed(trace: ReadTrace, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(passage, head) that each row has at each block, of a numbered trace."""
    number = sum(trace.matrix(t, blocks).astype(int) << t for t in range(11))
    return np.divmod(number, 64)  # type: ignore[return-value]


def test_a_group_has_all_passages_once_before_any_twice(numbered: ReadTrace) -> None:
    passage, head = placed(numbered, 90)
    assert passage.shape == (ROWS, 90)
    for first in range(0, 240, HEADS):
        rows = slice(first, first + HEADS)
        assert (passage[rows] == passage[first]).all()
        assert (head[rows] == np.arange(HEADS)[:, None]).all()
    assert (passage[240:] == passage[240]).all() and len(set(head[240:, 0])) == 16
    for row in passage:
        turns = row.reshape(3, 30)
        assert all(sorted(turn) == list(range(30)) for turn in turns)
        assert not np.array_equal(turns[0], turns[1])
    assert len({row.tobytes() for row in passage}) == 7


def test_churn_and_share_are_those_of_the_recording() -> None:
    random = np.random.default_rng(0)
    trace = trace_of(random.integers(0, 2**7, (48, HEADS, WIDTH), dtype=np.uint32))
    rounds = [trace.matrix(t) for t in range(7)]
    assert rounds[0].shape == (256, BLOCKS_AT_100K) and rounds[0].dtype == bool
    bits = [trace.history >> np.uint32(t) & 1 for t in range(7)]
    for t in range(1, 7):
        assert rounds[t].mean() == pytest.approx(bits[t].mean(), abs=0.005)
        assert (rounds[t] & ~rounds[t - 1]).mean() == pytest.approx((bits[t] & ~bits[t - 1]).mean(), abs=0.005)
    assert all(np.array_equal(s.matrix(), r) for s, r in zip(trace.selections(), rounds, strict=True))
    assert trace.matrix(6, MOST_BLOCKS).shape == (256, 32768)


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
        passages, rounds = trace.accepted.shape
        assert trace.history.shape == (passages, HEADS, WIDTH) and trace.foreseen.shape == (passages, rounds)
        assert passages >= 25 and rounds >= 10
        assert trace.selected == pytest.approx(1 / int(trace.name[2:]), rel=0.07)
        stretched = trace.selections()
        selected = np.mean([selection.matrix().mean() for selection in stretched[4:]])
        assert selected == pytest.approx(trace.selected, rel=0.1)
        for back, churn in ((1, trace.churn), (4, trace.churn4)):
            assert churn_of(stretched, back) == pytest.approx(churn, rel=0.1)
        assert len({passage.tobytes() for passage in trace.history}) == passages
        assert 0 < trace.accepted.mean() < 4 and 0 < trace.foreseen[:, 1:].mean() < 1


@pytest.mark.long
def test_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small, through the real services."""
    small = {"PROMPT": 236, "GENERATED": 30, "ROUNDS": 5, "BLOCKS": 10, "BLOCKS_AT_100K": 20, "AT_ONCE": 2}
    for name, value in (small | {"BUDGETS": {"1/2": 0.6}, "READS": tmp_path / "t.npz"}).items():
        monkeypatch.setattr(read_trace, name, value)
    text, plan = tmp_path / "text.txt", load_plan(PLAN)
    text.write_text(" ".join(f"It was the year {1800 + i} and nothing had changed." for i in range(90)))
    (tmp_path / str(plan.provenance["files"][0])).write_text("The plan was calibrated on this.")
    read_trace.record_reads(str(tmp_path), tmp_path / "t.npz", 3)
    (trace,) = load_reads(tmp_path / "t.npz")
    about = about_reads(tmp_path / "t.npz")
    assert (about["plan"], about["books"]) == (plan.hash, "text.txt")
    assert trace.history.shape[1:] == (plan.target_layers * plan.target_kv_heads, 10)
    assert len(trace.history) in (2, 3) and trace.rounds == 5
    assert 0.3 < trace.selected < 0.8
    assert trace.accepted.max() <= 4 and not trace.foreseen[:, 0].any()
    # A verdict that was foreseen is one that kept all.
    assert (trace.accepted[:, :-1][trace.foreseen[:, 1:]] == 4).all()
    text.write_text("a few words")
    with pytest.raises(ValueError, match="too short"):
        read_trace.record_reads(str(tmp_path), tmp_path / "t.npz", 3)
    with pytest.raises(ValueError, match="1 passages: a row at 100K takes 2"):
        read_trace.record_reads(str(tmp_path), tmp_path / "t.npz", 1)
