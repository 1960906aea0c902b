"""How many screened tokens a dense pass confirms at once: the number that gives the most tokens for the time."""

import random

import pytest

from target_service.confirm_lengths import ASSUMED_ROUNDS, LIKELY, ConfirmLengths, StepKind, StepReads, confirm_lengths
from tests.settings import target_settings

WEIGHTS = 120_000.0  # of 8b, in tokens of its KV
GAMMA, MOST, ACCEPTED = 4, 24, 0.8
LOAD = (1, 17)
SCREENS, CONFIRMS, DENSE = StepKind


def lengths(drafting: float, tokens: int, slower: float = 1.0) -> ConfirmLengths:
    """Return costs by 500 rounds that take a time for their draft, in steps over so many tokens; dense ones take a
    second. slower: how many times as long as their sizes say those take that confirm.
    """
    made, rng = ConfirmLengths(GAMMA, MOST, 0.06, WEIGHTS), random.Random(0)
    a_token = 1 / made.step_size(LOAD, DENSE, StepReads(tokens, tokens))
    for kind in rng.choices([SCREENS, CONFIRMS, DENSE], k=500):
        read = tokens * (0.06 if kind is SCREENS else 1)
        takes = made.step_size(LOAD, kind, StepReads(tokens, read)) * a_token * (slower if kind is CONFIRMS else 1)
        made.note_round(LOAD, kind, StepReads(tokens, read), takes, drafting, committed_of(rng))
    return made


def chosen(made: ConfirmLengths, chance: float, tokens: int) -> int:
    made.chance = chance
    made.choose(LOAD, tokens)
    return made.present


def committed_of(rng: random.Random) -> int:
    return 1 + next((i for i in range(GAMMA) if rng.random() > ACCEPTED), GAMMA)


def tokens_for_the_time(made: ConfirmLengths, most: int, chance: float, tokens: int) -> float:
    """Return the tokens that leave for the time of all steps, by playing 20,000 rounds."""
    rng, held, left, cost = random.Random(1), 0, 0, 0.0
    a_token, drafting = 1 / made.step_size(LOAD, DENSE, StepReads(tokens, tokens)), made.drafting.value
    screens = drafting + made.step_size(LOAD, SCREENS, StepReads(tokens, made.share * tokens)) * a_token
    for _ in range(20_000):
        if held + GAMMA < most:
            cost += screens
            held += committed_of(rng)
            continue
        cost += drafting + 1
        rejected = next((i for i in range(held) if rng.random() > chance), None)
        if rejected is None:
            left += held + committed_of(rng)
        else:  # the draft begins anew, and the round that it had made is lost
            left += rejected + 1
            cost += screens
        held = 0
    return left / cost


@pytest.mark.parametrize("chance", [0.995, 0.98, 0.95, 0.9, 0.7])
@pytest.mark.parametrize("tokens", [1_000, 130_000, 400_000])
@pytest.mark.parametrize("drafting", [0.2, 0.6])
def test_no_other_length_gives_many_more_tokens(drafting: float, tokens: int, chance: float) -> None:
    made = lengths(drafting, tokens)
    rates = {most: tokens_for_the_time(made, most, chance, tokens) for most in (0, *range(GAMMA + 1, MOST + 1))}
    best = chosen(made, chance, tokens)
    assert rates[best] > 0.95 * max(rates.values()), (best, rates)
    assert rates[best] >= 0.99 * rates[0]


def test_it_screens_where_contexts_are_long_and_most_is_confirmed() -> None:
    assert chosen(lengths(0.4, 400_000), 0.99, 400_000) > 16
    assert 0 < chosen(lengths(0.4, 400_000), 0.95, 400_000) < 12
    assert chosen(lengths(0.4, 400_000), 0.6, 400_000) == 0
    assert chosen(lengths(0.4, 8_000), 0.98, 8_000) == 0


def test_what_steps_that_confirm_were_seen_to_take_counts() -> None:
    """A dense pass over many tokens of a session may take longer than its sizes say."""
    at_best = [chosen(lengths(0.4, 400_000, slower), 0.97, 400_000) for slower in (1.0, 1.3, 3.0)]
    assert 0 < at_best[0] < at_best[1] and at_best[2] == 0


def test_a_kind_of_steps_that_was_hardly_seen_is_judged_by_dense_ones() -> None:
    """Else one slow step that screened would keep sessions from ever screening again."""
    made = lengths(0.4, 400_000)
    here = made.seconds[LOAD]
    here[SCREENS].value, here[SCREENS].rounds = 100 * here[DENSE].value, 1
    assert chosen(made, 0.99, 400_000) == 0  # seven times as slow as expected, by its weight of one in 17
    here[SCREENS].value /= 20
    assert chosen(made, 0.99, 400_000) > 0


def test_nothing_is_held_until_it_is_known_what_dense_steps_take_at_a_load() -> None:
    """What steps were seen to take at another load, of other sizes, says nothing."""
    made = lengths(0.4, 400_000)
    assert chosen(made, 0.99, 400_000) > 0
    made.choose((6, 16), 400_000)
    assert made.present == 0
    for _ in range(ASSUMED_ROUNDS):
        made.choose((6, 16), 400_000)
        assert made.present == 0
        made.note_round((6, 16), DENSE, StepReads(400_000, 400_000), 1.0, 0.4, 3)
    made.choose((6, 16), 400_000)
    assert made.present > 0


def test_steps_that_screen_are_tried_again_where_they_were_too_slow() -> None:
    made = lengths(0.4, 400_000)
    for _ in range(200):
        made.note_round(LOAD, SCREENS, StepReads(400_000, 24_000), 3.0, 0.4, 3)
    assert chosen(made, 0.99, 400_000) == 0
    rounds = 0
    while not chosen(made, 0.99, 400_000) and rounds < 20_000:
        made.note_round(LOAD, DENSE, StepReads(400_000, 400_000), 1.0, 0.4, 3)
        rounds += 1
    assert 1_000 < rounds < 15_000


def test_weights_in_eight_bits_have_screening_pay_sooner() -> None:
    """A step that screens costs half of the weights less."""
    settings = target_settings(hold=None, screening_quantization="fp8")
    light, other = confirm_lengths(settings, WEIGHTS), confirm_lengths(target_settings(hold=None), WEIGHTS)
    assert light is not None and other is not None
    assert (
        other.step_size(LOAD, SCREENS, StepReads(1000, 60)) - light.step_size(LOAD, SCREENS, StepReads(1000, 60))
        == WEIGHTS / 2
    )
    assert light.step_size(LOAD, CONFIRMS, StepReads(1000, 1000)) == other.step_size(
        LOAD, CONFIRMS, StepReads(1000, 1000)
    )
    for made in (light, other):
        for _ in range(50):
            made.note_round(LOAD, DENSE, StepReads(30_000, 30_000), 1.0, 0.6, 3)
    assert chosen(light, 0.98, 30_000) > 0 == chosen(other, 0.98, 30_000)


def test_what_comes_over_the_link_has_more_tokens_held_until_steps_that_screen_bring_as_much() -> None:
    """A dense pass takes ten times as long over tiers; one that screens does where its lists find no room."""
    whole, listed, cold = StepReads(30_000, 30_000, 22_500), StepReads(30_000, 1_800, 1_350), 0.75
    made = ConfirmLengths(GAMMA, MOST, 0.06, WEIGHTS)
    takes = {kind: made.step_size(LOAD, kind, whole) for kind in (DENSE, CONFIRMS)}
    for _ in range(ASSUMED_ROUNDS):
        made.note_round(LOAD, DENSE, whole, takes[DENSE], 0.0, 3, cold)
    assert chosen(made, 0.98, 30_000) == MOST
    for _ in range(100):
        made.note_round(LOAD, SCREENS, listed, made.step_size(LOAD, SCREENS, listed), 0.0, 3, 0.06 * cold)
        made.note_round(LOAD, CONFIRMS, whole, takes[CONFIRMS], 0.0, 3, cold)
    assert chosen(made, 0.98, 30_000) == MOST
    staged = listed._replace(fetched=whole.fetched)
    for _ in range(300):
        made.note_round(LOAD, SCREENS, staged, made.step_size(LOAD, SCREENS, staged), 0.0, 3, cold)
    assert chosen(made, 0.98, 30_000) == 0
    rounds = 0
    while not chosen(made, 0.98, 30_000) and rounds < 20_000:
        made.note_round(LOAD, DENSE, whole, takes[DENSE], 0.0, 3, cold)
        rounds += 1
    assert 1_000 < rounds < 15_000, "it is tried again"


def test_a_graph_that_is_captured_counts_as_four_steps_at_most() -> None:
    made = lengths(0.4, 100_000)
    before = made.drafting.value
    made.note_round(LOAD, DENSE, StepReads(100_000, 100_000), 0.01, 2.0, 3)
    assert made.drafting.value < before
    made.note_round(LOAD, DENSE, StepReads(100_000, 100_000), 1.0, 200.0, 3)
    assert before < made.drafting.value < 1.2 * before


def test_what_is_seen_of_held_tokens_counts_and_is_forgotten_where_nothing_is_held() -> None:
    made = lengths(0.4, 100_000)
    for _ in range(300):
        made.note_held(8, 2)
    assert made.chance == pytest.approx(2 / 3, abs=0.02)
    before = made.chance
    made.note_held(8, 8)
    assert made.chance > before
    before, made.present = made.chance, MOST
    made.note_held(0, 0)  # of a session that has just begun
    assert made.chance == before
    made.present = 0
    for _ in range(20_000):
        made.note_held(0, 0)
    assert made.chance == pytest.approx(LIKELY, abs=0.001)
    made.chance = 0.99
    made.note_held(0, 0)
    assert made.chance == 0.99


def test_lengths_that_are_given_are_not_chosen() -> None:
    assert confirm_lengths(target_settings(hold=8), WEIGHTS) is None
    made = confirm_lengths(target_settings(hold=None), WEIGHTS)
    assert made is not None and (made.most, made.present) == (14, 0)  # nothing is known yet
