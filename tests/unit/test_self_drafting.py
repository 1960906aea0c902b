"""A target that drafts for itself: what it reads, when it pays, and sessions that it drafts for."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specahead.config import TargetSettings
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.requests import gammas
from specahead.sparsity.plan import uniform_plan
from specahead.wire import messages as m
from target_service import service
from target_service.policy import CostTable, Load, Options, Policy, Proposer, Sizes
from target_service.policy.acceptance import OF_SELF
from target_service.self_drafting import SelfDrafting
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import GREEDY, FakeModel
from tests.unit.test_grammar_sessions import END, GRAMMARS, SCHEMA, plain
from tests.unit.test_sessions import PROMPT, RULED, STOPS, check_distribution
from tests.unit.world import World, prompts, totals

LLAMA_8B = uniform_plan(32, 8, 1, 1, budget=0.06)
WEIGHT_TOKENS = 16.1e9 / 131072

# Whether it pays, and what is read


def sizes(**how: float) -> Sizes:
    return Sizes(WEIGHT_TOKENS, **how)  # type: ignore[arg-type]


def cost(sizes: Sizes, gamma: int, tokens: int, away: int = 0) -> float:
    """Return what drafting adds to a step, in plain steps."""
    load = Load(1, tokens, away=away)
    return sizes.own_drafting(gamma, load) / sizes.plain(load)


def chosen(sizes: Sizes, load: Load, chance: float = OF_SELF, most: int = 8) -> int:
    """Return how many tokens a target drafts that has measured nothing."""
    options = Options(Proposer.SELF, tuple(gammas(most)), adaptive=True)
    policy = Policy(options, CostTable(sizes), Counter(), prior=chance)
    policy.choose(load)
    return policy.plan.gamma


def test_what_drafting_takes_follows_from_sizes() -> None:
    assert cost(sizes(), 8, 0) == pytest.approx(8 * 1.12), "without KV each drafting pass is a whole step, and more"
    rounds = {8 * 102_400: 87.4 / 29.0, 8 * 32_768: 58.4 / 12.65, 102_400: 41.8 / 7.2, 32_768: 38.4 / 5.08}
    for tokens, steps in rounds.items():  # in plain steps, with γ = 7 (docs/performance.md)
        assert 1 + cost(sizes(), 7, tokens) == pytest.approx(steps, rel=0.06)
    assert cost(sizes(), 8, 102_400, 102_400) < 0.2, "each step waits for the host's link"


def test_drafting_is_chosen_at_length_and_not_before_anything_is_measured() -> None:
    assert chosen(sizes(), Load(8, 8 * 4_096)) == 0
    assert chosen(sizes(), Load(8, 8 * 32_768)) > 1 and chosen(sizes(), Load(1, 102_400)) > 1
    assert chosen(sizes(), Load(1, 4_096, away=4_096)) == 4
    assert chosen(sizes(drafting_weights=0.5), Load(8, 8 * 8_192)) > 0, "weights in 8 bits have it pay sooner"


def test_as_many_tokens_are_drafted_as_are_the_fastest_by_what_is_accepted() -> None:
    load = Load(8, 8 * 102_400)
    drafted = [chosen(sizes(), load, chance, 7) for chance in (0.05, 0.45, 0.65, 0.85, 0.97)]
    assert drafted[0] == 0 and drafted[-1] == 7 and drafted == sorted(drafted) and len({*drafted}) > 3
    assert chosen(sizes(), Load(1, 32_768), 0.9, 7) == 0, "weights are most of what a pass reads"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"draft": "self"}, "drafting"),
        ({"draft": "auto"}, "drafting"),
        ({"draft": "lookup"}, "none"),
        ({}, "none"),
        ({"hold": 11, "screening_quantization": "fp8"}, "drafting"),
    ],
)
def test_a_target_that_drafts_for_itself_holds_its_weights_in_eight_bits_too(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], expected: str
) -> None:
    """One whose draft is a service holds them but once: the draft's are that service's affair."""
    asked = []

    def note(settings: TargetSettings, eight_bit: str) -> None:
        asked.append(eight_bit)
        raise StopIteration

    monkeypatch.setattr(service, "open_model", note)
    with pytest.raises(RuntimeError):
        asyncio.run(service.run(target_settings(draft_quantization="fp8", **changes), lambda server: None))
    assert asked == [expected]


def test_a_round_drafts_only_behind_one_that_weighed_the_kv() -> None:
    drafting = SelfDrafting(LLAMA_8B, 4)
    assert [drafting.can_draft(*of) for of in ((0, 100), (95, 100), (94, 100))] == [False, True, False]


def test_the_budget_holds_sinks_means_and_new_tokens() -> None:
    drafting = SelfDrafting(replace(LLAMA_8B, budget=0.06), 8)
    read = drafting.read(drafting.new_memory(), 4096, 8)
    assert read.drafts and read.group_means
    blocks, always = 257, 1 + 1 + 1  # the sink, the newest committed block, one of drafted tokens
    assert (read.budget.first, read.budget.last) == (1, 255)
    each = 0.06 * blocks - 1.5 * 7 / 16 - always
    assert read.budget.room == pytest.approx(256 * each, abs=1)
    assert not read.budget.bitmap.any()


def test_a_plan_without_sparse_layers_leaves_nothing_to_draft_over() -> None:
    assert SelfDrafting.over(replace(LLAMA_8B, dense_layers=tuple(range(32))), 0.1, 4) is None
    drafting = SelfDrafting.over(LLAMA_8B, 0.1, 4)
    assert drafting is not None and drafting.plan.budget == 0.1


# Sessions


def self_drafted(clock: Clock, seed: int, model: FakeModel, **how: object) -> World:
    return World(clock, seed, model, proposer="self", **how)  # type: ignore[arg-type]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])  # a clock may go on
@given(
    seed=st.integers(0, 999),
    gamma=st.integers(1, 8),
    pages=st.integers(24, 60),
    agreement=st.integers(2, 4),
    aborted=st.sets(st.integers(0, 4)),
    exactness=st.sampled_from(m.Exactness),
)
def test_greedy_is_plain_decoding_in_every_pool_and_whoever_leaves(
    clock: Clock, seed: int, gamma: int, pages: int, agreement: int, aborted: set[int], exactness: m.Exactness
) -> None:
    """Some give way for room, some are aborted, and drafts are right in half to all of the places."""
    world = self_drafted(clock, seed, FakeModel(agreement=agreement), gamma=gamma, pages=pages)
    texts = prompts(random.Random(seed), 5, 100)
    names = [world.open(prompt, 60, exactness=exactness, sparsity="ahead") for prompt in texts]
    world.run_and_check_greedy(names, aborted)
    drafted, accepted = totals(world)
    counted = world.verifier.counters
    assert (drafted, accepted) == (counted["self_draft_tokens"], counted["self_accepted_tokens"])
    assert counted["rounds"] == counted["self_rounds"] > 0
    right = agreement / 4
    expected = sum(right**count for count in range(1, gamma + 1)) / gamma  # of the drafted tokens
    assert accepted > 0.6 * expected * drafted
    world.check_nothing_left()


def test_a_session_first_weighs_and_then_drafts_in_every_round(clock: Clock) -> None:
    world = self_drafted(clock, 1, FakeModel(), gamma=4)
    name = world.open([*range(20)], 41)
    world.run()
    world.check_greedy(name)
    assert [(commit.drafted, len(commit.tokens)) for commit in world.commits[name]] == [(0, 1)] + [(4, 5)] * 8
    assert len(world.target.lists_drafted_by) == 8


@pytest.mark.parametrize(("agreement", "settled"), [(8, {8}), (1, {0, 1})])
def test_with_gamma_auto_rounds_draft_as_many_tokens_as_are_accepted(
    clock: Clock, agreement: int, settled: set[int]
) -> None:
    world = self_drafted(clock, 1, FakeModel(agreement=agreement), gamma=None)
    names = [world.open(prompt, 150) for prompt in prompts(random.Random(1), 4, 60)]
    world.run_and_check_greedy(names, set())
    drafted = [commit.drafted for name in names for commit in world.commits[name]]
    early, late = drafted[: len(drafted) // 8], [commit.drafted for commit in world.commits[names[0]][-10:]]
    assert 8 in early and set(late) <= settled, (early, late)
    assert world.verifier.counters["rounds_gamma_8"] == drafted.count(8) > 5, "what was chosen is told"
    world.check_nothing_left()


def test_drafts_that_are_never_right_are_left_out_and_tried_again(clock: Clock) -> None:
    world = self_drafted(clock, 1, FakeModel(agreement=0), gamma=4)
    name = world.open([7, 7, 7, 1], 90)
    world.run()
    world.check_greedy(name)
    drafted = [commit.drafted for commit in world.commits[name]]
    assert drafted[:2] == [0, 4] and drafted.count(4) < 40
    first_pause = drafted.index(0, 1)
    assert 4 in drafted[first_pause:], "it is tried again"
    assert world.verifier.counters["drafting_pauses"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [RULED["plain"], RULED["all"]], ids=["plain", "all"])
def test_sampled_tokens_have_the_targets_distribution(clock: Clock, sampling: Sampling) -> None:
    """The first token weighs, the second is drafted and judged, given the first."""
    model = FakeModel(agreement=2)
    world = self_drafted(clock, 5, model, gamma=2, prefill_chunk=512)
    names = [world.open(PROMPT, 3, replace(sampling, seed=seed), STOPS) for seed in range(500)]
    world.run()
    drafted, accepted = totals(world)
    assert drafted > 550 and 0.1 < accepted / drafted < 0.9
    check_distribution(world, names, PROMPT, sampling)


def test_a_grammar_is_followed(clock: Clock) -> None:
    model = FakeModel()
    world = self_drafted(clock, 3, model, grammars=GRAMMARS)
    texts = [[*start, *plain(model, SCHEMA, start, 40), *start] for start in ([1, 2, 3], [9, 8, 7], [30, 0, 30])]
    names = [world.open(prompt, 40, GREEDY, [END], grammar=SCHEMA) for prompt in texts]
    world.run()
    for name, prompt in zip(names, texts, strict=True):
        assert world.ledger.records[name].generated == plain(model, SCHEMA, prompt, 40)
