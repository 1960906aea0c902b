"""The table that `make demo` ends with."""

import pytest

from orchestrator.api.client import Generation
from orchestrator.demo import _summarise
from orchestrator.sessions.ledger import SpeculationTotals


@pytest.mark.parametrize("cached", [0, 90])
def test_the_table_says_that_the_second_run_found_its_prompt(cached: int, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        name: (Generation("", [1, 2], 100, "length", SpeculationTotals().summary(), found), 1.0, 2.0)
        for name, found in (("exact", 0), ("approximate", cached))
    }
    _summarise(runs)
    shown = capsys.readouterr().out
    assert ["of", "them", "found", "in", "the", "KV", "0", str(cached)] in [line.split() for line in shown.splitlines()]
    assert ("The second run found the KV of 90 of its 100 prompt tokens" in shown) == (cached == 90)
