"""A target that drafts for itself: what it reads, when it pays, and sessions that it drafts for."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.config import TargetSettings
from specahead.sparsity.plan import uniform_plan
from specahead.wire import messages as m
from target_service import service
from target_service.policy import Proposer
from target_service.self_drafting import SelfDrafting
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import FakeModel
from tests.unit.world import World, prompts, totals

LLAMA_8B = uniform_plan(32, 8, 1, 1, budget=0.06)


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

    def note(settings: TargetSettings, eight_bit: str, *others: object) -> None:
        asked.append(eight_bit)
        raise StopIteration

    monkeypatch.setattr(service, "open_model", note)
    with pytest.raises(RuntimeError):
        asyncio.run(service.run(target_settings(draft_quantization="fp8", **changes), lambda server: None))
    assert asked == [expected]


def test_a_round_drafts_only_behind_one_that_weighed_the_kv() -> None:
    drafting = SelfDrafting(LLAMA_8B, 4)
    assert [drafting.can_draft(*of) for of in ((0, 100), (95, 100), (94, 100))] == [False, True, False]


# Sessions


def self_drafted(clock: Clock, seed: int, model: FakeModel, **how: object) -> World:
    return World(clock, seed, model, proposer="self", **how)


@settings(max_examples=10)
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
    names = [world.open(prompt, 60, exactness=exactness) for prompt in texts]
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
    assert [(commit.drafted, len(commit.tokens)) for commit in world.commits[name]] == [(0, 1)] * 2 + [(4, 5)] * 7 + [
        (4, 4)
    ]
    assert [commit.proposer for commit in world.commits[name]] == [Proposer.NOBODY] * 2 + [Proposer.SELF] * 8
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
    assert world.verifier.counters["rounds_gamma_8"] == drafted.count(8) > 3, "what was chosen is told"
    world.check_nothing_left()
