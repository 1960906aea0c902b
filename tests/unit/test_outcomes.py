"""Which outcomes of a verdict are drafted for, and how many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.outcomes import likely_outcomes
from specahead.engine.steps.requests import MOST_ROWS, DraftedTokens, branches_of
from specahead.kernels.backends import power_of_two
from specahead.wire.messages import Exactness
from tests.unit.clock import Clock
from tests.unit.timed_models import TimedPair


@given(st.integers(1, 64), st.integers(1, 16), st.floats(0.05, 0.95))
def test_the_likeliest_outcomes_come_first_and_none_twice(seed: int, most: int, acceptance: float) -> None:
    likeliest = np.random.default_rng(seed).permuted(np.tile(np.arange(9), (5, 1)), axis=1)[:, :4]
    drafted = DraftedTokens(likeliest[:, 0].tolist(), alternatives=likeliest)
    outcomes = likely_outcomes(drafted, acceptance, most)
    assert outcomes[0] == (4, likeliest[4, 0])  # all are accepted, and what the draft goes on with follows
    assert len(set(outcomes)) == len(outcomes) == min(most, 1 + 5 * 3)
    assert all(token != likeliest[accepted, 0] for accepted, token in outcomes[1:])
    # Of several at one position the draft's own order counts.
    for position in range(5):
        ranks = [likeliest[position].tolist().index(token) for accepted, token in outcomes[1:] if accepted == position]
        assert ranks == sorted(ranks)


@given(st.integers(1, 300), st.integers(1, 16))
def test_branches_of_many_sessions_are_few(sessions: int, most: int) -> None:
    branches = branches_of(sessions, most)
    assert branches == 1 if most == 1 else 2 <= branches <= max(2, most)
    assert branches <= 2 or branches * power_of_two(sessions) <= MOST_ROWS
    assert branches >= branches_of(sessions + 1, most)


def test_a_step_drafts_for_no_more_outcomes_than_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch, every_clock: Clock
) -> None:
    pair = TimedPair(every_clock, 20, 100, 0.8, branches=8)
    counts: list[tuple[int, int]] = []
    drafts = pair.drafter.runner.draft_rounds

    def draft_rounds(requests: list) -> list:
        counts.append((len(requests), max(len(item.branches) for item in requests)))
        return drafts(requests)

    monkeypatch.setattr(pair.drafter.runner, "draft_rounds", draft_rounds)
    pair.generate([(100, Exactness.EXACT)] * 20, 60)
    assert all(branches <= branches_of(sessions, 8) for sessions, branches in counts)
    assert (20, 4) in counts and max(branches for _, branches in counts) > 4
