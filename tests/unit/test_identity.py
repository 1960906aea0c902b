"""The command that generates with and without KV in tiers: it says yes where tokens are the same, and no where not."""

import json

import pytest
import torch

from specahead import models
from specahead.cli.main import main
from specahead.engine.kv.backing_store import BackingStore
from specahead.engine.loading.model import load_model
from specahead.lab.evaluation import identity
from specahead.lab.evaluation.identity import MIXES, Requests, _first_difference, _open_target
from target_service.verifier import Verifier
from tests.plans import bundled_plan
from tests.settings import target_settings

SIZES = ["--context", "200", "--generated", "8", "--hot", "0.6"]


@pytest.mark.long
def test_tokens_are_the_same_down_to_the_fewest_frames(capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", "identity", *SIZES, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["mix"] for row in rows] == [mix for mix in MIXES for _ in range(2)]
    for row in rows:
        assert row["identical"] and row["tokens"] == 8 * row["sessions"]
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


def test_fewer_frames_are_refused() -> None:
    requests = Requests([[1] * 100, [2] * 40], 12, 4)
    model = load_model(str(models.TARGET), torch.float32, "cpu")
    for frames in (requests.least_frames("both"), requests.least_frames("both") - 1):
        runner = _open_target(model, requests, "both", frames)
        settings = target_settings(gamma=4, prefill_chunk=64, max_sessions=4, max_context=requests.longest)
        if frames == requests.least_frames("both"):
            Verifier(runner, bundled_plan(), settings)
            continue
        with pytest.raises(ValueError, match="write up to 16 at once: raise kv_memory"):
            Verifier(runner, bundled_plan(), settings)


def test_where_tokens_differ_first() -> None:
    wanted = {"a": [1, 2, 3], "b": [4, 5]}
    assert _first_difference(wanted, {"a": [1, 2, 3], "b": [4, 5]}) == ""
    assert _first_difference(wanted, {"a": [1, 2, 3], "b": [4, 6]}) == "b at 1"
    assert _first_difference(wanted, {"a": [1, 2], "b": [4, 6]}) == "a at 2"


def test_what_is_refused() -> None:
    for flags, message in (
        (["identity", "--hot", "1.5"], "hot must be shares between 0 and 1"),
        (
            ["identity", "--hot", "0.01", "--context", "300"],
            "write up to 13 at once, 28.3%: hot must be more, got 1.0%",
        ),
        (["identity", "--context", "90000"], "a text has .* tokens after 2% of it; 9000 are needed"),
        (["recall"], "evaluate recall reads texts: give --text or --books"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["evaluate", *flags])
