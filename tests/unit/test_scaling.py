"""How many targets the load asks for: never too many or too few, not before the delays, and not to and fro."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cluster.scaling import Scaler, Scaling, TargetLoad, scaling_of, wanted
from specahead.config import ClusterSettings
from specahead.config.launch import Autoscaling

LOADS = st.builds(TargetLoad, st.floats(0, 1), st.floats(0, 100))
SCALINGS = st.builds(
    lambda least, more, *rest: Scaling(least, least + more, *rest),
    *(
        st.integers(1, 4),
        st.integers(0, 8),
        st.floats(0.05, 1),
        st.floats(0.1, 20),
        st.floats(0, 60),
        st.floats(0, 600),
    ),
)
SCALING = Scaling(least=1, most=8, kv_use=0.7, wait=5, out_delay=30, in_delay=600)


@given(st.lists(LOADS, max_size=12), SCALINGS)
def test_what_is_wanted_is_within_the_bounds_and_enough(loads: list[TargetLoad], scaling: Scaling) -> None:
    number = wanted(loads, scaling)
    assert scaling.least <= number <= scaling.most
    if number < scaling.most:
        assert sum(load.kv_use for load in loads) / number <= scaling.kv_use + 1e-6
        if loads and sum(load.wait for load in loads) / len(loads) > scaling.wait:
            assert number > len(loads)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), SCALINGS)
def test_the_same_kv_spread_over_what_is_wanted_asks_for_nothing_else(uses: list[float], scaling: Scaling) -> None:
    number = wanted([TargetLoad(use, 0) for use in uses], scaling)
    spread = [TargetLoad(sum(uses) / number, 0)] * number
    assert wanted(spread, scaling) == number


@given(st.lists(st.tuples(st.lists(LOADS, min_size=1, max_size=8), st.floats(0.1, 100)), max_size=30), SCALINGS)
def test_nothing_changes_before_it_was_wanted_without_a_break(
    course: list[tuple[list[TargetLoad], float]], scaling: Scaling
) -> None:
    """And what is chosen then is the nearest of the numbers that were wanted in the delay."""
    scaler, present, now = Scaler(scaling), scaling.least, 0.0
    seen: list[tuple[float, int]] = []  # since the last change
    for loads, seconds in course:
        now += seconds
        seen.append((now, wanted(loads, scaling)))
        number = scaler.decide(loads, present, now)
        assert scaling.least <= number <= scaling.most
        if number != present:
            up = number > present
            delay = scaling.out_delay if up else scaling.in_delay
            breaks = [at for at, each in seen if (each <= present if up else each >= present)]
            since = next(at for at, _ in seen if not breaks or at > breaks[-1])
            assert now - since >= delay
            run = [each for at, each in seen if at >= since]
            assert number == (min(run) if up else max(run))
            present, seen = number, []


def test_a_load_that_lasts_is_answered_when_its_delay_is_over() -> None:
    scaler, busy, idle = Scaler(SCALING), [TargetLoad(0.95, 9.0)], [TargetLoad(0.1, 0.0)]
    assert [scaler.decide(busy, 1, at) for at in (100, 115, 129.9, 130)] == [1, 1, 1, 2]
    assert scaler.decide(busy * 2, 2, 131) == 2, "the next step has a delay of its own"
    assert scaler.decide(idle * 2, 2, 140) == 2
    assert scaler.decide(idle * 2, 2, 739) == 2
    assert scaler.decide([TargetLoad(0.6, 0)] * 2, 2, 739.5) == 2, "a moment of load, and the delay begins anew"
    assert scaler.decide(idle * 2, 2, 740) == 2
    assert scaler.decide(idle * 2, 2, 1340) == 1


@pytest.mark.parametrize(
    ("loads", "number"),
    [
        ([], 1),
        ([TargetLoad(0.0, 0.0)] * 3, 1),
        ([TargetLoad(0.5, 0.0)] * 3, 3),  # two would have 0.75 in use
        ([TargetLoad(0.9, 0.0)] * 3, 4),
        ([TargetLoad(0.1, 3.0)] * 3, 3),  # while sessions wait, no target goes
        ([TargetLoad(0.1, 6.0)] * 3, 4),
        ([TargetLoad(0.1, 600.0)] * 3, 6),  # twice as many at most
        ([TargetLoad(1.0, 600.0)] * 8, 8),
    ],
)
def test_what_loads_ask_for(loads: list[TargetLoad], number: int) -> None:
    assert wanted(loads, SCALING) == number


def test_nothing_that_serves_asks_for_nothing() -> None:
    assert Scaler(SCALING).decide([], 3, 1000) == 3


def test_settings_say_whether_a_launch_scales() -> None:
    assert scaling_of(ClusterSettings(targets=2)) is None
    assert scaling_of(ClusterSettings(targets=2, autoscaling=Autoscaling(max_targets=2))) is None
    scaling = scaling_of(ClusterSettings(targets=2, autoscaling=Autoscaling(max_targets=6, wait=1.5)))
    assert scaling == Scaling(2, 6, 0.7, 1.5, 30, 600)
