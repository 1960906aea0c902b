"""What the serving benchmark computes and prints, and its smallest run. No claims about time."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specahead.cli.main import main
from specahead.engine.steps.requests import DraftedTokens
from specahead.lab.benchmarks.serving import parts
from specahead.lab.benchmarks.serving.breakdown import RoundParts, break_down
from specahead.lab.benchmarks.serving.deployment import Deployment, Pair, Room
from specahead.lab.benchmarks.serving.imposed import foreseeing, imposed_token
from specahead.lab.benchmarks.serving.rows import describe_breakdown
from specahead.lab.benchmarks.serving.timeline import StepTimes, Timeline
from specahead.wire.tasks import meanwhile

SAID = "target service, pid 1\ngRPC endpoint: here:1\nHTTP endpoint: http://here:2\nready"  # by a process that serves
S = "run/0"  # a session of the run
TINY = ["bench", "serve", "--target-shape", "tiny", "--draft-shape", "tiny"]


# What a round waits for. Rounds begin at 1.000 s; times below are milliseconds after that.


def step(
    planned: float, began: float, ended: float, finished: float, gpu: float, round_: int, epoch: int = 0
) -> StepTimes:
    times = (1 + 1e-3 * at for at in (planned, began, ended, finished))
    return StepTimes(*times, gpu=1e-3 * gpu, rounds=[(S, epoch, round_)])


def parts_of(target: Timeline, draft: Timeline) -> RoundParts:
    result = break_down(target, draft, "run", settled=1)
    assert result.rounds == 1
    return result.parts


def judged(planned: float, began: float, ended: float, finished: float, gpu: float) -> list[StepTimes]:
    """The steps of rounds 0 and 1, of which the first is finished at 0."""
    return [step(-9, -8, -1, 0, 6, 0), step(planned, began, ended, finished, gpu, 1)]


def test_a_round_after_its_verdict() -> None:
    target = Timeline(judged(20, 21, 28, 30, 5), [((S, 0, 1), 1.016)])
    draft = Timeline([step(4, 5, 11, 13, 4, 1)], [((S, 0, 1), 1.003)])
    assert break_down(target, draft, "run", settled=1).met == 0
    parts = parts_of(target, draft)
    assert parts == RoundParts(*map(pytest.approx, (3 + 3, 1, 1 + 2 + 2, 4, 4, 1 + 2 + 2, 5)))
    assert parts.whole == pytest.approx(30)


def test_what_was_drafted_ahead_counts_from_the_rounds_beginning() -> None:
    target = Timeline(judged(12, 12, 18, 19, 6), [((S, 0, 1), 1.006)])
    draft = Timeline([step(-6, -5, 3, 4, 8, 1)], [((S, 0, 1), 1.009)])
    parts = parts_of(target, draft)
    assert parts == RoundParts(*map(pytest.approx, (2, 0, 1, 3, 6, 1, 6)))
    assert parts.whole == pytest.approx(19)
    shared = break_down(target, draft, "run", settled=1, one_device=True)
    assert shared.device_idle == pytest.approx(1 - (6 + 3) / 19), "of the draft's 8 ms the window has 3"
    assert "idle: device 52.6%, 10.00 ms of a round" in describe_breakdown(shared)


def test_without_a_draft_the_target_is_all_there_is() -> None:
    result = break_down(Timeline(judged(1, 2, 7, 8, 4)), None, "run", settled=1)
    assert result.parts == RoundParts(*map(pytest.approx, (0, 0, 0, 0, 1, 3, 4)))
    assert result.draft_idle == 1
    assert result.target_idle == pytest.approx(1 - 4 / 8)


# The command.


@pytest.mark.long
def test_the_smallest_run_with_the_draft_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.json"
    sizes = ["--shapes", "2x200", "--tokens", "140", "--placement", "apart", "--breakdown"]
    main([*TINY, *sizes, "--speculation", '{"gamma": 4, "branches": 2}', "--json", str(file)])
    content = json.loads(file.read_text())
    assert content["failures"] == []
    assert [row["context"] for row in content["prompts"]] == [200]
    rows = {row["way"]["mode"]: row for row in content["rows"]}
    assert set(rows) == {"none", "exact", "approximate"}
    for mode, row in rows.items():
        seen, breakdown = row["figures"], row["breakdown"]
        assert seen["tokens_a_second"] > 0
        assert 0 < seen["gap_p50"] <= seen["gap_p99"] and seen["first_token_p50"] > 0
        assert (seen["kv_read"] < 1) == (mode == "approximate")
        assert (row["of_none"] is None) == (mode == "none")
        assert breakdown["rounds"] > 0 and breakdown["parts"]["verify_gpu"] > 0
        assert (breakdown["parts"]["draft_gpu"] > 0) == (mode != "none")
        assert 0 < breakdown["target_idle"] < 1
    assert rows["none"]["figures"]["tokens_a_round"] == 1 < rows["exact"]["figures"]["tokens_a_round"] <= 5
    assert 'approximate {"gamma": 4, "branches": 2}' in capsys.readouterr().out


@pytest.mark.long
def test_the_smallest_run_with_the_draft_in_two_targets(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    sizes = ["--shapes", "4x200", "--tokens", "400", "--modes", "approximate", "--breakdown"]
    main([*TINY, *sizes, "--targets", "2", "--arrivals", "1", "--requests", "2", "--json", str(file)])
    content = json.loads(file.read_text())
    assert content["failures"] == []
    assert [(row["way"], row["requests"], row["refused"]) for row in content["arrivals"]] == [("approximate", 2, 0)]
    assert set(content["starts"][0]) == {"target-1", "target-2"}
    (drafted,) = content["rows"]
    assert 1 < drafted["figures"]["tokens_a_round"] <= 5 and drafted["figures"]["kv_read"] < 1
    assert drafted["breakdown"]["parts"]["draft_gpu"] > 0 < drafted["breakdown"]["parts"]["verify_gpu"]
    assert drafted["breakdown"]["target_idle"] + drafted["breakdown"]["draft_idle"] >= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "10"], "it takes 72"),
        (["--part-limit", "0"], "must be positive"),
        (["--speculation", "[]"], "is no mapping"),
        (["--speculation", '{"waves": 2}'], "no such key: waves"),
        (["--targets", "-1"], "at least 0"),
        (["--shapes", "8"], "SESSIONSxCONTEXT"),
        (["--draft", "none", "--modes", "exact"], "give none among --modes"),
        (["--tensor-parallel-size", "2", "--gpus", "0", "0"], "GPUs 0 0: expected 2 for target"),
        (["--placement", "apart", "--gpus", "0"], "expected 1 for target, 1 for draft"),
    ],
)
def test_flags_that_give_nothing_to_measure(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main([*TINY, *flags])


def test_targets_take_their_gpus_before_the_draft(tmp_path: Path) -> None:
    pair = Pair("tiny", "tiny", 0.8, 0.1, targets=2, tensor_parallel_size=2).on([3, 0, 1, 2, 4])
    started: dict[tuple[int, ...], tuple[str, ...]] = {}
    with contextlib.ExitStack() as processes:

        def start(*command: str, stdout: int, gpus: Sequence[int] = ()) -> subprocess.Popen[str]:
            started[tuple(gpus)] = command
            return processes.enter_context(subprocess.Popen(["echo", SAID], stdout=stdout, text=True))

        Deployment(start, tmp_path, pair, Room(2, 100), 10.0).start()
    assert list(started) == [(3, 0), (1, 2), (4,), ()]  # the last ones are the endpoints
    ranks = [command[command.index("--tensor-parallel-size") + 1] for command in (started[3, 0], started[1, 2])]
    assert ranks == ["2", "2"] and "--tensor-parallel-size" not in started[4,]


def test_a_draft_service_keeps_its_link_only_while_a_draft_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, seen = [False], asyncio.Queue[str]()

    async def keep(target: str) -> None:
        seen.put_nowait(f"at {target}")
        try:
            await asyncio.Event().wait()
        finally:
            seen.put_nowait("left")

    async def change() -> None:
        async with meanwhile(parts.keep_link_while(lambda: wanted[0], "target-1")), asyncio.timeout(10):
            for wanted[0], what in ((True, "at target-1"), (False, "left"), (True, "at target-1")):
                assert await seen.get() == what
        assert seen.get_nowait() == "left"

    monkeypatch.setattr(parts, "keep_link", keep)
    asyncio.run(change())


def test_the_imposed_token_is_the_next_choice_at_a_share_of_the_positions() -> None:
    drafted = [DraftedTokens([1, 2, 3], alternatives=np.full((3, 4), 9)) for _ in range(200)]
    starts = list(range(100, 700, 3))
    known = 0
    for start, before, after in zip(starts, drafted, foreseeing(drafted, starts, 1000), strict=True):
        imposed = [imposed_token(start + i, 1000) for i in range(3)]
        assert after.tokens[:2] == before.tokens[:2] and after.tokens[2] in (3, imposed[2])
        assert after.alternatives[:, 0].tolist() == after.tokens
        assert all(second in (9, token) for second, token in zip(after.alternatives[:, 1], imposed, strict=True))
        known += int((after.alternatives[:, 1] != 9).sum())
    assert 0.8 < known / 600 < 0.9
    alone = [DraftedTokens([1, 2, 3]), DraftedTokens([4, 5, 6])]
    assert [each.tokens[:2] for each in foreseeing(alone, [7, 9], 1000)] == [[1, 2], [4, 5]]
