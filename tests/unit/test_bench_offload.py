"""Steps over tiers give what steps over resident KV give, however pages are fetched; and the benchmark's rehearsal."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from specahead.cli.main import main
from specahead.engine.model.decoder import Decoder
from specahead.lab.benchmarks.offload import rounds_of, selections
from specahead.lab.benchmarks.offload_kv import compare_logits
from specahead.lab.benchmarks.offload_steps import (
    IN_STEP,
    ON_DEMAND,
    SETTLED,
    Case,
    Home,
    Step,
    make_home,
    replay,
    resident_kv,
    tiered_kv,
)
from specahead.lab.benchmarks.selection_trace import ROWS
from specahead.lab.benchmarks.shapes import SHAPES, random_decoder

CPU = torch.device("cpu")
CASE = Case(SHAPES["tiny"], 2, 512, 3, torch.float32)


def parts() -> tuple[Decoder, Home]:
    torch.manual_seed(0)
    decoder = random_decoder(CASE.shape, CASE.context + CASE.queries, "cpu", torch.float32)
    return decoder, make_home(CASE, CPU)


def steps() -> list[Step]:
    """Resident, fetching in the step, on demand, over the same KV."""
    decoder, home = parts()
    resident = resident_kv(CASE, home, CPU)
    words = rounds_of(CASE, 0.1, CPU)[0]
    return [
        Step(decoder, resident, CASE, words),
        *(Step(decoder, tiered_kv(CASE, 0.5, home, CPU), CASE, words, way) for way in (IN_STEP, ON_DEMAND)),
    ]


def listed(step: Step) -> np.ndarray:
    """bool [sequences, rows, pages]: what the step has read."""
    lists, counts = step.buffers.tensors["lists"], step.buffers.tensors["counts"]
    chosen = torch.zeros(*lists.shape[:3], CASE.pages_each + 1, dtype=torch.bool)
    valid = torch.arange(lists.shape[3]) < counts[..., None]
    chosen.scatter_(3, lists.long().where(valid, CASE.pages_each), True)
    return chosen[..., :-1].transpose(0, 1).flatten(1, 2).numpy()


@torch.inference_mode()
@pytest.mark.parametrize("harm", ["", "a key", "a value", "a mean", "the new page"])
def test_what_differs_is_seen(harm: str) -> None:
    """A check that says yes to what is the same says no to a single wrong number that a step reads."""
    decoder, home = parts()
    rounds = rounds_of(CASE, 0.1, CPU)
    resident = Step(decoder, resident_kv(CASE, home, CPU), CASE, rounds[0])
    if harm in ("a key", "a value"):
        home[harm == "a value"][1][0, 1, 5, 3] += 1  # of the first page, which all rounds read
    kv = tiered_kv(CASE, 0.5, home, CPU)
    tiered = Step(decoder, kv, CASE, rounds[0])
    if harm == "a mean":
        assert kv.means is not None
        kv.means.v[0, 0, 0, 0] += 1
    if harm == "the new page":
        tiered.buffers.tensors["positions"][CASE.queries] += 1
    check = compare_logits(replay(tiered, rounds, 1).logits, replay(resident, rounds, 1).logits)
    assert check.rounds == len(rounds)
    assert check.same == (not harm)
    assert check.difference is not None and (check.difference > 0) == bool(harm)


@pytest.mark.parametrize("share", [1 / 32, 1 / 16, 1 / 10, 1 / 8])
def test_selections_have_the_share_and_sessions_do_not_move_in_step(share: float) -> None:
    rounds, other = (selections(20480, share, session) for session in (1, 2))
    assert rounds[0].shape == (ROWS, 1280) and len(rounds) > SETTLED + 10
    assert np.mean([chosen.mean() for chosen in rounds]) == pytest.approx(share, rel=0.1)
    new = rounds[6] & ~rounds[5]
    assert 0.03 < new.sum() / rounds[6].sum() < 0.1
    assert (new & other[6] & ~other[5]).sum() < 0.5 * new.sum()


@pytest.mark.long
def test_the_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    sizes = ["--contexts", "512", "--batches", "2", "--hot", "0.5", "--passes", "1", "--shares", "0.1", "0.0625"]
    main(["bench", "offload", "--shape", "tiny", *sizes, "--json", str(file)])
    content = json.loads(file.read_text())
    ways = [way for way in ("resident", "in step", "on demand") for _ in range(2)]
    assert [(row["way"], row["share"]) for row in content["rows"]] == [
        (way, share) for way, share in zip(ways, [0.1, 0.0625] * 3, strict=True)
    ]
    in_step, on_demand = content["rows"][2:6:2]
    assert 0 < in_step["pages_fetched"] < in_step["pages_read"]
    assert in_step["bytes_fetched"] == pytest.approx(in_step["pages_fetched"] * 2 * 16 * 16 * 4)
    for name in ("pages_read", "pages_fetched", "pages_refused"):
        assert in_step[name] == on_demand[name]
    for row in content["rows"][2:]:
        assert row["check"] == {"rounds": row["check"]["rounds"], "same": True, "difference": 0.0}
        assert row["check"]["rounds"] > SETTLED
    assert in_step["bound"] >= in_step["resident"] == content["rows"][0]["milliseconds"]
    if not torch.cuda.is_available():
        assert "a rehearsal" in capsys.readouterr().out
