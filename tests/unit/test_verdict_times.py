"""When a draft puts off a step that no target waits for."""

import time

import numpy as np
import pytest

from draft_service.sessions import DraftedOutcome, DraftedRound, DraftSession, TargetPeer
from draft_service.steps import Work, put_off_until
from draft_service.verdict_times import VerdictTimes
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.requests import DraftedTokens
from specahead.wire.messages import At, Begin


def session(peer: TargetPeer, drafted: bool) -> DraftSession:
    begin = Begin(At("s", 0, 0, 3), [1, 2, 3], Sampling(temperature=0.0), 100, "")
    known = DraftSession.from_begin(peer, begin, 4)
    if drafted:
        known.present = DraftedRound(3, [DraftedOutcome(3, 3, DraftedTokens([4, 5, 6, 7, 8]), source=2)], 0.0)
    return known


def peer(verdicts: VerdictTimes) -> TargetPeer:
    return TargetPeer(lambda event: None, verdicts=verdicts)


def test_the_gap_is_that_between_steps() -> None:
    times = VerdictTimes()
    for step in np.arange(20.0) * 0.05 + 7:
        for verdict in range(8):  # all of a step come together
            times.note(step + verdict * 1e-5)
    assert times.gap == pytest.approx(0.05, rel=0.01)
    latest = times.latest
    # A step of 20 ms may begin 30 ms before the next verdicts are expected, not later, and not while they are late.
    assert times.put_off_until(latest + 0.029, 0.02) == 0
    assert times.put_off_until(latest + 0.031, 0.02) == pytest.approx(latest + 0.08, abs=1e-3)
    assert times.put_off_until(latest + 0.079, 0.02) > 0
    assert times.put_off_until(latest + 0.081, 0.02) == 0


def test_nothing_is_known_of_a_target_without_verdicts() -> None:
    times = VerdictTimes()
    assert times.put_off_until(time.perf_counter(), 0.02) == 0
    times.note(time.perf_counter())
    assert times.put_off_until(time.perf_counter(), 0.02) == 0


def test_only_a_part_of_one_targets_sessions_that_nobody_waits_for_is_put_off() -> None:
    now = time.perf_counter()
    soon = peer(VerdictTimes(latest=now, gap=100.0))
    judged, ahead, urgent = session(soon, True), session(soon, True), session(soon, False)
    assert put_off_until(Work([judged, ahead], [ahead], []), 200.0) > now
    # It would have ended before the verdicts.
    assert put_off_until(Work([judged, ahead], [ahead], []), 50.0) == 0
    # All sessions take part, a target waits for one of them, or a prompt is read.
    assert put_off_until(Work([judged, ahead], [judged, ahead], []), 200.0) == 0
    assert put_off_until(Work([judged, ahead, urgent], [ahead, urgent], []), 200.0) == 0
    assert put_off_until(Work([judged, ahead], [ahead], [urgent]), 200.0) == 0
    # Another target's sessions have a time of their own.
    other = session(peer(VerdictTimes(latest=now, gap=100.0)), True)
    assert put_off_until(Work([judged, ahead, other], [ahead], []), 200.0) == 0
