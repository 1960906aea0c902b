"""The simulator itself: seeds hold, runs repeat, and all faults and situations occur."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.simulation.old_bugs import BUGS_OF_FULL_TARGETS, OLD_BUGS, find
from tests.simulation.runs import Result, run_seed, run_seeds
from tests.simulation.scenario import FAULTS, Scenario
from tests.simulation.world import World

SEEDS = 160
# Each of these must occur in the seeds.
SITUATIONS = {
    *("client: stop", "client: length", "client: abort", "client: left", "client: INTERNAL", "client: UNAVAILABLE"),
    *("client: DEADLINE_EXCEEDED", "client: RESOURCE_EXHAUSTED", "client: INVALID_ARGUMENT"),
    *("gateway: repeated_commits", "gateway: unknown_session_commits"),
    *("target: foreseen_rounds", "target: plain_rounds", "target: steps_chained_to_steps"),
    *("target: draft_timeouts", "target: drafting_pauses"),
    *("target: self_rounds", "target: self_accepted_tokens"),
    *("target: drafting_probes", "target: rounds_gamma_1", "target: rounds_gamma_2", "target: rounds_gamma_4"),
    *("target: stale_frames", "target: repeated_frames", "target: unknown_session_frames"),
    *("target: aborted_sessions", "target: failed_sessions", "target: failed_steps", "target: taken_up_sessions"),
    *("draft: declined_sessions", "draft: failed_steps", "draft: repeated_verdicts", "draft: stale_frames"),
    *("draft in target: proposals", "draft in target: declined_sessions"),
    *("draft: met_verdicts", "draft: announcements", "full windows", "repeated frames"),
}


@pytest.fixture(scope="module")
def result() -> Result:
    return run_seeds(range(SEEDS))


def test_seeds_hold(result: Result) -> None:
    assert result.seeds == SEEDS
    assert not result.violations


FULL_SEEDS = range(24)
FINDING_SEEDS = range(130, 154)  # each bug is found by one of these


def of_full_targets(seeds: range) -> Iterator[World]:
    """Run worlds in which a target is lost while the other one has no place, and yield each after its run."""
    for seed in seeds:
        world = World(Scenario.full(seed))
        world.run()
        yield world


def test_what_a_lost_target_had_accepted_is_kept_whatever_the_queues_of_others() -> None:
    worlds = list(of_full_targets(FULL_SEEDS))
    assert not [violation for world in worlds for violation in world.violations]
    assert sum(world.coverage["client: RESOURCE_EXHAUSTED"] for world in worlds) > 0, "new requests are refused"
    assert sum(len(world.accepted) for world in worlds) > len(FULL_SEEDS)


@pytest.mark.parametrize("bug", BUGS_OF_FULL_TARGETS)
def test_a_refusal_of_what_was_accepted_is_found(bug: Callable[[], AbstractContextManager[Any]]) -> None:
    with bug():
        violations = (violation for world in of_full_targets(FINDING_SEEDS) for violation in world.violations)
        assert "accepted, got" in next(violations)


def test_every_fault_happens(result: Result) -> None:
    assert set(result.faults) == set(FAULTS)


def test_the_situations_of_the_protocol_come_up(result: Result) -> None:
    assert not SITUATIONS - set(+result.coverage)


def test_a_seed_repeats_in_another_process() -> None:
    """Hashes, addresses, clocks and earlier seeds have no influence: the seeds run in the reverse order there."""
    program = (
        "import sys; from tests.simulation.runs import run_seed\n"
        "for seed in sys.argv[1:]:\n"
        "    world = run_seed(int(seed)); print(world.loop.events, world.log.length, world.log.checksum)"
    )
    wanted = {}
    for seed in (3, 34):
        world = run_seed(seed)
        wanted[seed] = [b"%d" % number for number in (world.loop.events, world.log.length, world.log.checksum)]
    command = [sys.executable, "-c", program, "34", "3"]
    environment = os.environ | {"PYTHONHASHSEED": "2"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert [line.split() for line in output.splitlines()] == [wanted[34], wanted[3]]


@pytest.mark.parametrize("bug", OLD_BUGS)
def test_an_old_bug_is_found(bug: str) -> None:
    """One of the first seeds finds the bug; which one depends on the protocol."""
    found = find(bug, range(SEEDS))
    assert found is not None
    assert "find each other" not in found[1], "the change breaks everything, so it is no realistic bug"
