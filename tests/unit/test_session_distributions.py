"""What sessions draw has the target's distribution: 20,000 draws that would show a twentieth of it moved.

The power against each bias is computed from the draws' own distributions (tests/unit/distributions.py) and must reach
0.99. That the biases are found is shown with judges that have them.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from specahead.engine.sampling.distributions import Sampling
from tests.unit.clock import Clock
from tests.unit.distributions import ALPHA, BIASES, Draws, bias_judges, check
from tests.unit.many_sessions import ManySessions, draws_of
from tests.unit.test_grammar_sessions import END, GRAMMARS, TOKENS
from tests.unit.world import totals

PROMPT, STOPS = [7, 30, 6, 15, 26], [11, 12]
RULED = {
    "plain": Sampling(0.8, 0.95),
    "biases": Sampling(1.0, 0.97, logit_bias={3: 3.0, 8: 2.0, 26: -100.0}),
    "penalties": Sampling(1.0, 0.97, presence_penalty=1.0, frequency_penalty=0.3, repetition_penalty=1.5),
    "min_tokens": Sampling(1.0, 0.97, min_tokens=60),
    "top_k": Sampling(1.3, 1.0, top_k=5),
    "all": Sampling(1.1, 0.95, 0, 12, 0.02, 0.6, 0.2, 1.2, {3: 2.0, 8: 1.5, 26: -100.0}, 60),
    "grammar": Sampling(1.1, 0.95),
}
LETTERS, DIGITS = "abctruefls", "0123456789"
TRIPLES = LLMatcher.grammar_from_regex(f"([{LETTERS}][{DIGITS}]{{2}})+")  # a letter, two digits, and again
EACH, MOST = 39, 100  # sessions of each kind, and tokens of one


def in_triples(place: int) -> list[int]:
    """Return the tokens that the grammar allows at a place."""
    if place % 3:
        return [TOKENS.index(digit) for digit in DIGITS]
    return [TOKENS.index(letter) for letter in LETTERS] + ([END] if place else [])


def stops_of(kind: str) -> list[int]:
    return [END] if kind == "grammar" else STOPS if RULED[kind].min_tokens else []


def draw(clock: Clock, levels: int, kinds: Collection[str] = tuple(RULED), each: int = EACH) -> dict[str, Draws]:
    """Return what sessions of these kinds draw, side by side in the same steps.

    levels: 2: draft and target. 3: what a draft proposes is screened before the target confirms it.
    """
    count, confirms = each * len(kinds), 7 if levels == 3 else 0
    world = ManySessions(clock, count, ahead=False, hold=confirms, grammars=GRAMMARS)
    prompt = PROMPT * (32 if levels == 3 else 1)  # of a short one everything is read
    names: dict[str, list[str]] = {}
    for number, kind in enumerate(kinds):
        how = {"stop": stops_of(kind), "grammar": TRIPLES if kind == "grammar" else ""}
        seeds = range(1000 * number, 1000 * number + each)
        names[kind] = [world.open(prompt, MOST, replace(RULED[kind], seed=seed), **how) for seed in seeds]
    world.run()
    world.check_nothing_left()
    counted, (drafted, accepted) = world.verifier.counters, totals(world)
    assert counted["failed_sessions"] == world.drafter.counters["failed_sessions"] == 0
    shares = [accepted / drafted]
    if levels == 3:
        shares.append(counted["confirmed_tokens"] / counted["screened_tokens"])
        assert counted["screened_tokens"] > 5 * count
    assert all(0.3 < share < 0.95 for share in shares), shares  # each level accepts and rejects
    return {
        kind: draws_of(
            [world.ledger.records[name].generated for name in of_kind],
            *(prompt, RULED[kind], stops_of(kind) if kind != "grammar" else []),
            in_triples if kind == "grammar" else None,
        )
        for kind, of_kind in names.items()
    }


def together(drawn: Mapping[Any, Draws]) -> Draws:
    return Draws(
        torch.cat([each.probs for each in drawn.values()]), torch.cat([each.tokens for each in drawn.values()])
    )


@pytest.mark.parametrize("levels", [2, 3])
def test_sessions_draw_from_the_targets_distribution(clock: Clock, levels: int) -> None:
    """Draft and target, or sparse attention between them; each kind of rule by itself, and all of them together."""
    drawn = draw(clock, levels)
    assert len(together(drawn).tokens) >= 20_000
    check(together(drawn))
    for kind, draws in drawn.items():
        assert draws.p_value() > ALPHA, kind


@pytest.mark.long
@pytest.mark.parametrize("kind", RULED)
@pytest.mark.parametrize("levels", [2, 3])
def test_sessions_of_one_kind_draw_from_the_targets_distribution(clock: Clock, levels: int, kind: str) -> None:
    (draws,) = draw(clock, levels, [kind], 480 if kind == "grammar" else 320).values()
    assert len(draws.tokens) >= 20_000
    check(draws)


def test_a_judge_that_moves_a_twentieth_is_found(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_judged_distributions has the other bias as well."""
    bias_judges(monkeypatch, BIASES["rolled"])
    assert together(draw(clock, 2)).p_value() < ALPHA
