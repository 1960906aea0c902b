"""Prompt lookup: what it proposes, and sessions that it proposes for instead of a draft."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.config import SettingsError
from specahead.engine.sampling.distributions import Sampling
from specahead.wire import messages as m
from target_service.policy.lookup import LONGEST, MANY, PLACES, SHORTEST, FirstGuess, Judged, LookedUp, PromptLookup
from target_service.policy.pace import FIRST_PAUSE, LONGEST_PAUSE
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import TABLE, FakeModel, hashed
from tests.unit.test_draft_in_target import Turns
from tests.unit.test_sessions import PROMPT, RULED, STOPS, check_distribution
from tests.unit.world import World, prompts, totals

# What is proposed


def searched(tokens: list[int], count: int, stays: int | None = None) -> list[int]:
    """The same by looking at the whole text, or at as much of it as stays."""
    ends = len(tokens) if stays is None else stays
    places = [p for p in range(SHORTEST, ends) if tokens[p - SHORTEST : p] == tokens[-SHORTEST:]]
    best, longest = 0, 0
    for place in places[::-1][:PLACES]:
        length = 0
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    found = list(tokens)
    for at in range(best, best + min(count, longest)):
        found.append(found[at])
    return found[len(tokens) :]


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 20), min_size=1), st.integers(0, 9))
def test_the_latest_of_the_longest_matches_is_found_however_the_text_grew(
    tokens: list[int], parts: list[int], count: int
) -> None:
    lookup, length = PromptLookup(), 0
    for part in parts:
        length += part
        if part % 2:
            lookup.extend(tokens, min(length, len(tokens)))
        else:
            assert lookup.propose(tokens[:length], count) == searched(tokens[:length], count)
    assert lookup.propose(tokens, count) == searched(tokens, count)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(2, 9), st.integers(0, 9))
def test_a_long_text_that_is_indexed_at_once_is_found_like_one_that_came_token_by_token(
    seed: int, kinds: int, count: int
) -> None:
    """It has few kinds of tokens, so that n-grams recur at its beginning, after it, and over its end."""
    rng = random.Random(seed)
    tokens = [rng.randrange(kinds) for _ in range(MANY + 60)]
    lookup = PromptLookup()
    for length in range(MANY, len(tokens), 7):
        assert lookup.propose(tokens[:length], count) == searched(tokens[:length], count)


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.lists(st.integers(0, 2), max_size=9)), st.integers(0, 9))
def test_what_may_be_taken_back_is_looked_up_but_matched_by_nothing(
    text: list[int], tries: list[list[int]], count: int
) -> None:
    """Half of each try stays; what follows in place of the other half is found as if that had never been."""
    lookup, stays = PromptLookup(), list(text)
    for held in tries:
        tokens = stays + held
        assert lookup.propose(tokens, count, stays=len(stays)) == searched(tokens, count, len(stays))
        stays += held[: len(held) // 2]
    assert lookup.propose(stays, count) == searched(stays, count)


def test_a_guess_needs_a_long_match_and_pauses_longer_each_time_it_is_in_vain() -> None:
    text, guess, lookup = [*range(40), *range(LONGEST)], FirstGuess(15), PromptLookup()
    guess.guess(lookup, text[:-2], 99, alone=False)
    assert guess.tokens == [] and guess.found == [*range(14, 28)]
    guess.guess(lookup, text[:-2], 99, alone=True)
    assert guess.tokens == [*range(14, 28)]
    guess.guess(lookup, text, 99, alone=False)
    assert guess.tokens == [*range(16, 31)]
    guess.guess(lookup, text, 3, alone=False)
    assert guess.tokens == [16, 17, 18]
    guess.guess(lookup, text, 0, alone=False)
    assert guess.tokens == []
    committed, pauses = len(text), []
    for _ in range(8):
        guess.note(15, 7, committed)
        guess.guess(lookup, text, 99, alone=False)
        assert guess.tokens == []
        pauses.append(guess.pause.until - committed)
        committed = guess.pause.until
    assert pauses == [FIRST_PAUSE * 2**i for i in range(6)] + [LONGEST_PAUSE] * 2
    guess.note(15, 8, committed)
    guess.note(15, 0, committed)
    assert guess.pause.until == committed + FIRST_PAUSE


def test_what_is_found_is_judged_by_what_is_committed_though_it_was_not_proposed() -> None:
    text, guess, lookup = [*range(40), 0, 1, 2, 3], FirstGuess(15), PromptLookup()
    guess.guess(lookup, text, 99, alone=False)
    assert guess.tokens == [] and guess.found == [4, 5, 6, 7]
    assert guess.judge(len(text) - 1, [4, 5]) is None, "it was found for another place"
    for committed, judged in (
        ([4, 5], (2, False, 2)),
        ([4, 9, 6], (1, True, 0)),
        ([4, 5, 6, 7, 8], (4, False, 0)),  # lookup found nothing for the last one
    ):
        guess.guess(lookup, text, 99, alone=False)
        assert guess.judge(len(text), committed) == judged
    guess.guess(lookup, [77, 78, 79], 99, alone=False)
    assert guess.found == [] and guess.judge(3, [80]) == (0, False, 0)


@pytest.mark.parametrize(("first", "next_one"), [(0.1, 0.9), (0.8, 0.8), (0.3, 0.1)])
@pytest.mark.parametrize("reached", [3, 99])
def test_what_lookup_alone_would_bring_is_known_though_rounds_end_before_it(
    first: float, next_one: float, reached: int
) -> None:
    """After texts of which lookup found nearly all. Standard errors of the means below: at most 0.3 tokens."""
    rng, looked_up, seen = random.Random(1), LookedUp(tokens=12.0, goes_on=0.99), list[float]()
    for i in range(6000):
        right = 0
        while right < 15 and rng.random() < (next_one if right else first):
            right += 1
        known = min(right, reached)
        looked_up.note(Judged(known, right < min(15, reached), 15 - known if right >= reached else 0), 1 / 128)
        seen += [looked_up.tokens] * (i >= 1000)
    wanted = 1 + first * sum(next_one**i for i in range(15))
    assert sum(seen) / len(seen) == pytest.approx(wanted, abs=0.45)


def test_a_session_alone_proposes_until_next_to_nothing_of_what_is_found_is_right() -> None:
    text, guess, lookup = [*range(40), 0, 1, 2, 3], FirstGuess(15), PromptLookup()
    proposed = 0
    for _ in range(60):
        guess.guess(lookup, text, 99, alone=True)
        proposed += bool(guess.tokens)
        assert guess.judge(len(text), [99]) == (0, True, 0)
    guess.guess(lookup, text, 99, alone=True)
    assert 8 < proposed < 59
    assert guess.tokens == []
    for _ in range(8):
        assert guess.judge(len(text), [4, 5, 6]) == (3, False, 1)
        assert guess.judge(len(text), [4, 5, 6]) is None, "a place is judged once"
        guess.guess(lookup, text, 99, alone=True)
    assert guess.tokens, "what is found is judged while it is not proposed"
    guess.forget()
    assert guess.tokens == [] and guess.judge(len(text), [4]) is None


# Sessions


class Repeating(FakeModel):
    """Its next token follows from the last two, so that its texts soon go round in circles."""

    def target(self, tokens: list[int]) -> np.ndarray:
        return TABLE[hashed(tokens[-2:]) % len(TABLE)]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    gamma=st.integers(1, 8),
    pages=st.integers(24, 60),
    aborted=st.sets(st.integers(0, 4)),
    exactness=st.sampled_from(m.Exactness),
)
def test_greedy_is_plain_decoding_in_every_pool_and_whoever_leaves(
    clock: Clock, seed: int, gamma: int, pages: int, aborted: set[int], exactness: m.Exactness
) -> None:
    """Texts that repeat and texts that do not, in the same steps; some give way for room, some are aborted."""
    world = World(clock, seed, Repeating(), gamma=gamma, pages=pages, proposer="lookup")
    names = [world.open(prompt, 60, exactness=exactness) for prompt in prompts(random.Random(seed), 5, 100)]
    world.run_and_check_greedy(names, aborted)
    drafted, accepted = totals(world)
    counted = world.verifier.counters
    assert (drafted, accepted) == (counted["lookup_draft_tokens"], counted["lookup_accepted_tokens"])
    assert counted["rounds"] == counted["lookup_rounds"]
    assert accepted + 2 >= drafted / 4, "an aborted session may have had one proposal"
    world.check_nothing_left()


class Leaping(Repeating):
    """Every 60th token takes it to another circle."""

    def target(self, tokens: list[int]) -> np.ndarray:
        return TABLE[hashed(tokens[-2:] if len(tokens) % 60 else tokens) % len(TABLE)]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    agreement=st.integers(0, 4),
    branches=st.sampled_from([1, 3]),
    pages=st.integers(60, 90),
    aborted=st.sets(st.integers(0, 3)),
    in_target=st.booleans(),
)
def test_what_is_guessed_before_a_draft_is_asked_changes_no_token(
    clock: Clock, seed: int, agreement: int, branches: int, pages: int, aborted: set[int], in_target: bool
) -> None:
    """Whoever drafts, gives way or leaves meanwhile."""
    how = {"pages": pages, "draft_pages": pages, "lookup": True, "prefill_chunk": 64, "ahead": not in_target}
    world = World(clock, seed, Leaping(agreement=agreement), branches=1 if in_target else branches, **how)
    names = [world.open(prompt, 150) for prompt in prompts(random.Random(seed), 4, 30)]
    if in_target:
        world.run = Turns(world).run
    else:
        world.attach()
    world.run_and_check_greedy(names, aborted)
    counted = world.verifier.counters
    assert counted["lookup_accepted_tokens"] >= counted["lookup_draft_tokens"] / 6 - 15, "one wrong guess at most"
    assert counted["rounds"] > counted["lookup_rounds"] >= 0
    made = Counter(commit.proposer for name in names for commit in world.commits[name] if commit.drafted)
    assert made[m.Proposer.DRAFT] and made[m.Proposer.LOOKUP] == counted["lookup_rounds"]
    world.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [RULED["plain"], RULED["all"]], ids=["plain", "all"])
def test_sampled_tokens_have_the_targets_distribution(clock: Clock, sampling: Sampling) -> None:
    """Behind a prompt whose end occurred before: the first token of the proposal is drawn or not, given the target."""
    model, prompt = FakeModel(), [*PROMPT, 3, *PROMPT]
    sampling = replace(sampling, logit_bias={3: 3.5})  # else it is hardly ever accepted
    world = World(clock, 5, model, gamma=2, prefill_chunk=512, proposer="lookup")
    names = [world.open(prompt, 2, replace(sampling, seed=seed), STOPS) for seed in range(600)]
    world.run()
    drafted, accepted = totals(world)
    assert drafted == 600 and 0.15 < accepted / drafted < 0.85
    check_distribution(world, names, prompt, sampling, first=3)


@pytest.mark.parametrize(("wrong", "named"), [({"draft": "lookup"}, "draft lookup"), ({"draft": "self"}, "draft self")])
def test_what_is_not_built_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=f"lookup is not built with {named}"):
        target_settings(lookup=True, **wrong)
    assert target_settings(lookup=True).widest_round == 16
    assert target_settings(lookup=True, gamma=20).widest_round == 21
    assert target_settings(lookup=True, hold=None).widest_round == 16
    assert target_settings(lookup=True, hold=14).widest_round == 19
    assert target_settings(lookup=True, hold=6).widest_round == 16
