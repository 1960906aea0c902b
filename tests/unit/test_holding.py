"""The mean of what audits find is held below a limit, whatever they find, if it falls with what is read."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_service.policy.holding import CONFIDENCE, FAR, NEAR, RISE, TRUSTED, Holding, upper_bound

LIMITS = 0.02, 0.05, 0.1, 0.3


@pytest.mark.parametrize("mean", [0.0, 0.01, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("weight", [1.0, 20.0, 500.0])
def test_the_bound_solves_its_equation(mean: float, weight: float) -> None:
    bound = upper_bound(mean, weight)
    assert mean <= bound <= 1
    if mean == 0:
        assert bound == pytest.approx(1 - (1 - CONFIDENCE) ** (1 / weight))
    elif bound < 1:
        unlikely = mean * math.log(mean / bound) + (1 - mean) * math.log((1 - mean) / (1 - bound))
        assert unlikely == pytest.approx(-math.log(1 - CONFIDENCE) / weight, rel=1e-4)
    assert upper_bound(mean, 2 * weight) <= bound, "more audits say more"


@pytest.mark.parametrize("true", [0.02, 0.1, 0.4])
def test_the_bound_holds_as_often_as_it_says(true: float) -> None:
    """Means may fade, and values are the worst for a given mean: 0 and 1."""
    chosen, missed, tries = random.Random(1), 0, 2000
    for _ in range(tries):
        weight = total = 0.0
        for _ in range(80):
            weight, total = 0.97 * weight + 1, 0.97 * total + (chosen.random() < true)
        missed += upper_bound(total / weight, weight) < true
    assert missed / tries <= 1 - CONFIDENCE


@given(
    limit=st.sampled_from(LIMITS),
    doublings=st.integers(1, 5),
    found=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 6)), min_size=1, max_size=400),
)
def test_any_divergence_that_falls_with_what_is_read_is_held(
    limit: float, doublings: int, found: list[tuple[float, float]]
) -> None:
    """At each audit another one, as an opponent would choose: `most`, fading with the factor by some power, 0 where
    everything is read. What goes beyond the limit is a few audits for each doubling, however many there are.
    """
    holding, beyond = Holding(limit, RISE**doublings), 0.0
    for most, power in found:
        value = 0.0 if holding.reads_all else most / holding.factor**power
        beyond += value - limit
        holding.note(value)
        assert 1 <= holding.factor <= holding.most
        assert beyond <= 4 * (doublings + 1)


@pytest.mark.parametrize("limit", LIMITS)
def test_the_factor_rises_before_the_bound_reaches_the_limit(limit: float) -> None:
    """Doubling at each second audit that finds everything wrong; one alone changes nothing."""
    holding, factors = Holding(limit, 8.0), list[float]()
    assert holding.bound == pytest.approx(TRUSTED * limit, rel=0.02)
    for _ in range(6):
        holding.note(1.0)
        factors.append(holding.factor)
        assert holding.bound < limit
    assert factors == [1, 2, 2, 4, 4, 8] and holding.reads_all


def test_it_falls_slowly_and_never_below_the_plan() -> None:
    holding = Holding(0.1, 16.0, factor=4.0)
    factors = []
    for _ in range(600):
        holding.note(0.0)
        factors.append(holding.factor)
    stays = [factors.count(factor) for factor in sorted(set(factors), reverse=True)]
    assert factors[-1] == 1 and len(stays) == 9, "eight steps by a sixth are two doublings"
    assert min(stays) >= holding.prior / 2 - 1


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_what_is_usual_changes_nothing(share: float) -> None:
    """Steadily a quarter of the limit: no factor rises for it, however long."""
    holding = Holding(0.2, 16.0)
    for _ in range(2000):
        holding.note(share * 0.2)
    assert holding.factor == 1 and holding.bound < NEAR * 0.2
    assert (holding.bound < FAR * 0.2) == (share < 0.2)


def test_a_limit_of_1_holds_nothing() -> None:
    holding = Holding(1.0, 16.0)
    for _ in range(100):
        holding.note(1.0)
    assert holding.factor == 1


def test_trust_takes_several_sessions_to_lose() -> None:
    one, all_ = Holding(0.1, 16.0), Holding(0.1, 16.0, trust=4.0)
    assert all_.prior == pytest.approx(4 * one.prior)
    rises = 0
    while all_.factor == 1:
        all_.note(1.0)
        rises += 1
    assert 8 < rises < 24
