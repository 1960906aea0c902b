"""The command that generates with and without KV in tiers: it says yes where tokens are the same, and no where not."""

import json

import pytest

from specahead.cli.main import main
from specahead.engine.kv.backing_store import BackingStore
from specahead.lab.evaluation import identity
from specahead.lab.evaluation.identity import MIXES

SIZES = ["--context", "200", "--generated", "24", "--hot", "0.6"]


@pytest.mark.long
def test_tokens_are_the_same_down_to_the_fewest_frames(capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", "identity", *SIZES, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["mix"] for row in rows] == [mix for mix in MIXES for _ in range(2)]
    for row in rows:
        assert not row["difference"] and row["tokens"] == 24 * row["sessions"]
        assert row["frames"] < row["pages"]
        # Prompts whose pages have left, and exact rounds; sparse ones.
        assert row["staged"] > 0 or row["fetched"] > 0
        assert (row["fetched"] > 0) == (row["mix"] != "exact")


def test_a_token_that_differs_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is stored, so that what has left the device is lost."""
    monkeypatch.setattr(BackingStore, "_copy_layers", lambda *_: None)
    monkeypatch.setattr(identity, "MIXES", {"exact": MIXES["exact"]})
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "identity", *SIZES])
    assert ended.value.code == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("float32 on ")
    assert said[1].split() == [*("sessions", "frames", "hot", "fetched", "staged", "overflow", "tokens", "identical")]
    assert len(said) == 4
    assert any(" no, exact " in line for line in said)
