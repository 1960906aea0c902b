"""Recorded reads: they come from the services, and are stretched as they say."""

import numpy as np
import pytest

from specahead.lab.benchmarks.read_trace import READS, about_reads, load_reads
from specahead.models import PLAN
from specahead.sparsity.plan import load_plan
from specahead.sparsity.selection import BlockSelection

HEADS, WIDTH = 40, 250


def churn_of(selections: list[BlockSelection], before: int) -> float:
    """Return the mean share of a round's blocks that none of the last `before` rounds had, from the fifth round on."""
    new = total = 0
    for i in range(4, len(selections)):
        known = selections[i - 1].words
        for other in selections[i - before : i - 1]:
            known = known | other.words
        new += int(np.bitwise_count(selections[i].words & ~known).sum())
        total += int(np.bitwise_count(selections[i].words).sum())
    return new / max(1, total)


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
        stretched = [BlockSelection.from_matrix(trace.matrix(i)) for i in range(trace.rounds)]
        selected = np.mean([selection.matrix().mean() for selection in stretched[4:]])
        assert selected == pytest.approx(trace.selected, rel=0.1)
        for back, churn in ((1, trace.churn), (4, trace.churn4)):
            assert churn_of(stretched, back) == pytest.approx(churn, rel=0.1)
        assert len({passage.tobytes() for passage in trace.history}) == passages
