"""When a session is decoded without its draft, and for how long."""

import numpy as np

from target_service.usefulness import FIRST_PAUSE, LEAST, LONGEST_PAUSE, RETRY, START, Usefulness


def rounds_to_pause(state: Usefulness) -> int:
    """Rounds that accept nothing, up to the pause that they lead to."""
    rounds, before = 0, state.paused_until
    while state.paused_until == before:
        rounds += 1
        state = state.after_round(0, 1000 + rounds)
    return rounds


def test_nothing_accepted_leads_to_a_pause_and_after_it_sooner_to_the_next() -> None:
    assert rounds_to_pause(Usefulness()) == 15
    assert rounds_to_pause(Usefulness(average=RETRY, paused_until=500)) == 4


def test_a_pause_lasts_so_many_committed_tokens() -> None:
    state = Usefulness(average=LEAST).after_round(0, 100)
    assert state == Usefulness(RETRY, 2 * FIRST_PAUSE, 100 + FIRST_PAUSE)
    assert state.is_paused(100) and state.is_paused(100 + FIRST_PAUSE - 1)
    assert not state.is_paused(100 + FIRST_PAUSE)
    assert not Usefulness().is_paused(0)


def test_pauses_grow_to_the_longest_and_start_again_after_a_round_of_use() -> None:
    state, committed, lasted = Usefulness(), 0, []
    while len(lasted) < 8:
        committed += 1
        before = state.paused_until
        state = state.after_round(0, committed)
        if state.paused_until != before:
            lasted.append(state.paused_until - committed)
            committed = state.paused_until
    assert lasted == [16, 32, 64, 128, 256, 512, 512, 512]
    assert lasted[-1] == LONGEST_PAUSE
    assert state.after_round(1, committed).next_pause == LONGEST_PAUSE
    state = state.after_round(4, committed)
    assert state.average > START and state.next_pause == FIRST_PAUSE


def test_a_draft_that_mostly_agrees_is_never_paused() -> None:
    """Four tokens a round of which each is right with probability 0.6, 1000 sessions of 100 rounds."""
    right = np.random.default_rng(0).random((1000, 100, 4)) < 0.6
    accepted = np.where(right.all(-1), 4, right.argmin(-1))
    for session in accepted.tolist():
        state = Usefulness()
        for committed, count in enumerate(session):
            state = state.after_round(count, committed)
        assert state.paused_until == 0
