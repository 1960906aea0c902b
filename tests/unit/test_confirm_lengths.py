"""How many screened tokens a dense pass confirms at once: the number that gives the most tokens for the time."""

import random

import pytest

from config import TargetSettings
from target_service.confirm_lengths import LIKELY, ConfirmLengths, chance_behind, confirm_lengths

WEIGHTS = 120_000.0  # of 8b, in tokens of its KV
GAMMA, MOST, ACCEPTED = 4, 24, 0.8


def lengths(drafting: float, tokens: int) -> ConfirmLengths:
    """Return costs by 500 rounds that take a time for their draft, in dense steps over so many tokens."""
    made, rng = ConfirmLengths(GAMMA, MOST, 0.06, WEIGHTS), random.Random(0)
    for _ in range(500):
        made.note_round(tokens, tokens, False, 1.0, drafting, committed_of(rng))
    return made


def committed_of(rng: random.Random) -> int:
    return 1 + next((i for i in range(GAMMA) if rng.random() > ACCEPTED), GAMMA)


def tokens_for_the_time(made: ConfirmLengths, most: int, chance: float, tokens: int) -> float:
    """Return the tokens that leave for the cost of all steps, by playing 20,000 rounds."""
    rng, held, left, cost = random.Random(1), 0, 0, 0.0
    for _ in range(20_000):
        cost += made.drafting + made.step_cost(tokens, made.share * tokens, True)
        if held + GAMMA < most:
            held += committed_of(rng)
            continue
        cost += (1 - made.share) * tokens
        rejected = next((i for i in range(held) if rng.random() > chance), None)
        if rejected is None:
            left += held + committed_of(rng)
        else:  # the draft begins anew, and the round that it had made is lost
            left += rejected + 1
            cost += made.drafting + made.step_cost(tokens, made.share * tokens, True)
        held = 0
    return left / cost


@pytest.mark.parametrize("chance", [0.995, 0.98, 0.95, 0.9, 0.7])
@pytest.mark.parametrize("tokens", [1_000, 130_000, 400_000])
@pytest.mark.parametrize("drafting", [0.2, 0.6])
def test_no_other_length_gives_many_more_tokens(drafting: float, tokens: int, chance: float) -> None:
    made = lengths(drafting, tokens)
    rates = {most: tokens_for_the_time(made, most, chance, tokens) for most in (0, *range(GAMMA + 1, MOST + 1))}
    chosen = made.best(chance, tokens)
    assert rates[chosen] > 0.95 * max(rates.values()), (chosen, rates)
    assert rates[chosen] >= 0.99 * rates[0]


def test_it_screens_where_contexts_are_long_and_most_is_confirmed() -> None:
    assert lengths(0.4, 400_000).best(0.99, 400_000) > 16
    assert 0 < lengths(0.4, 400_000).best(0.95, 400_000) < 12
    assert lengths(0.4, 400_000).best(0.6, 400_000) == 0
    assert lengths(0.4, 8_000).best(0.98, 8_000) == 0


def test_weights_in_eight_bits_have_screening_pay_sooner() -> None:
    """A step that screens costs half of the weights less."""
    settings = TargetSettings(confirm_every=-1, screening_quantization="fp8")
    light, other = confirm_lengths(settings, WEIGHTS), confirm_lengths(TargetSettings(confirm_every=-1), WEIGHTS)
    assert light is not None and other is not None
    assert other.step_cost(1000, 60, True) - light.step_cost(1000, 60, True) == WEIGHTS / 2
    assert light.step_cost(1000, 1000, False) == other.step_cost(1000, 1000, False)
    for made in (light, other):
        for _ in range(50):
            made.note_round(30_000, 1_800, True, 1.0, 0.6, 3)
    assert light.best(0.98, 30_000) > 0 == other.best(0.98, 30_000)


def test_a_graph_that_is_captured_counts_as_four_steps_at_most() -> None:
    made = lengths(0.4, 100_000)
    before = made.drafting
    made.note_round(100_000, 100_000, False, 0.01, 2.0, 3)
    assert before < made.drafting < 1.2 * before


def test_what_is_seen_of_a_session_counts_and_is_forgotten_where_nothing_is_held() -> None:
    chance = LIKELY
    for _ in range(60):
        chance = chance_behind(chance, 8, 2)
    assert chance == pytest.approx(2 / 3, abs=0.02)
    assert chance_behind(chance, 8, 8) > chance
    for _ in range(3000):
        chance = chance_behind(chance, 0, 0)
    assert chance == pytest.approx(LIKELY, abs=0.001)
    assert chance_behind(0.99, 0, 0) == 0.99


def test_lengths_that_are_given_are_not_chosen() -> None:
    assert confirm_lengths(TargetSettings(confirm_every=8), WEIGHTS) is None
    made = confirm_lengths(TargetSettings(confirm_every=-1), WEIGHTS)
    assert made is not None and made.best(0.5, 1000) == made.most == 11  # nothing is known yet
