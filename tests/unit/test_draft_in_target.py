"""A target that runs its draft itself: the steps of both by turns, and what they say to each other at once."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead import models
from specahead.config import SettingsError, TargetSettings
from specahead.engine.loading.config import load_shape
from specahead.engine.loading.memory import bytes_of_token, room_for_kv
from specahead.engine.loading.opening import open_both
from specahead.engine.parallel.ranks import ALONE
from specahead.engine.steps.step_loop import run_step_loop
from specahead.wire import messages as m
from target_service.draft_in_target import LaunchRounds, Result, Step, StepsByTurns
from target_service.verify_step import VerifyStep
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import VOCAB, FakeModel
from tests.unit.test_screening import ScreeningRunner, Screens
from tests.unit.test_screening import check_kv as check_screened_kv
from tests.unit.test_sessions import PROMPT, RULED, STOPS, check_distribution
from tests.unit.world import PLAN, World, prompts, totals


class Turns:
    """A world whose draft is in the target. kinds: which model each step was of, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = StepsByTurns(world.verifier, world.drafter)
        self.kinds: list[str] = []

    def run(self) -> None:
        """Run steps until there is nothing to do."""
        for _ in range(5000):
            step = self.steps.plan_step()
            if step is None:
                return
            if not isinstance(step, LaunchRounds):
                self.kinds.append("verify" if isinstance(step, VerifyStep) else "draft")
            self.steps.finish_step(step, self.execute(step))
            if self.world.verifier.under_way is None:
                self.world.check_kv()
            if self.world.script:
                self.world.script.pop(0)()
        raise AssertionError("the sessions do not come to an end")

    def execute(self, step: Step) -> Result:
        return self.steps.execute(step)

    def check_nothing_left(self) -> None:
        self.world.check_nothing_left()
        assert not self.world.busy()
        (draft,) = self.world.verifier.protocol.drafts
        assert not draft.sessions


def turns(clock: Clock, seed: int = 0, model: FakeModel | None = None, chains: bool = True, **settings: Any) -> Turns:
    world = World(clock, seed, model or FakeModel(agreement=3), ahead=False, **settings)
    world.target.chains_rounds = world.draft.chains_rounds = chains
    return Turns(world)


@pytest.mark.parametrize("exactness", m.Exactness)
@pytest.mark.parametrize("agreement", [0, 3, 4])
@pytest.mark.parametrize("chains", [True, False])
def test_greedy_is_plain_decoding(clock: Clock, exactness: m.Exactness, agreement: int, chains: bool) -> None:
    """And no round is plain but the first, none waits: a draft's step stands before each other one of the target's.

    Where nothing needs the host between them, all but the first of the target's are launched behind the draft's rounds.
    """
    made = turns(clock, 1, FakeModel(exactness is m.Exactness.APPROXIMATE, agreement, recent=1), chains)
    names = [made.world.open(prompt, 80, exactness=exactness) for prompt in prompts(made.world.rng, 4)]
    made.run()
    for name in names:
        made.world.check_greedy(name)
    drafted, accepted = totals(made.world)
    assert drafted > 40
    assert accepted == {0: 0, 4: drafted}.get(agreement, accepted)
    counters = made.world.verifier.counters
    assert counters["draft_timeouts"] == counters["stale_frames"] == counters["rejected_events"] == 0
    # A draft that is never right is left out for a while.
    assert counters["plain_rounds"] <= len(names) or not agreement
    behind = counters["steps_chained_to_rounds"]
    assert (behind > 0) == chains
    drafting = made.kinds.count("draft")
    assert not behind or not agreement or behind > drafting / 3, made.kinds  # prompts are read at first
    assert not behind or behind / 2 < counters["rounds_chained_to_steps"] <= behind
    assert (counters["announced_bytes"] > 0) == (exactness is m.Exactness.APPROXIMATE)
    made.check_nothing_left()


@pytest.mark.parametrize(
    ("exactness", "tokens", "most"),
    [(m.Exactness.EXACT, 160, 0.8), (m.Exactness.APPROXIMATE, 60, 1.0)],
    ids=["exact", "ahead"],
)
def test_alternatives_that_are_right_save_steps(clock: Clock, exactness: m.Exactness, tokens: int, most: float) -> None:
    """The texts are the same, and the draft goes on behind an alternative as behind what it drafted itself. The text of
    `ahead` goes round in small circles, in which a token more a round hardly saves one.
    """
    rounds = []
    for beside in (0, 3):
        model = FakeModel(exactness is m.Exactness.APPROXIMATE, agreement=2, recent=1, swaps=True)
        made = turns(clock, 1, model)
        made.world.target.beside = beside
        names = [made.world.open(prompt, tokens, exactness=exactness) for prompt in prompts(made.world.rng, 4)]
        made.run()
        for name in names:
            made.world.check_greedy(name)
        counters = made.world.verifier.counters
        assert (counters["accepted_alternatives"] > 20) == (beside > 0)
        assert counters["rounds_chained_to_steps"] > 0.8 * counters["steps_chained_to_rounds"]
        drafted, accepted = totals(made.world)
        assert accepted <= drafted
        rounds.append(counters["rounds"] + counters["plain_rounds"])
        made.check_nothing_left()
    assert rounds[1] < most * rounds[0], rounds


def test_clients_hear_of_a_step_once_the_next_one_is_launched(clock: Clock) -> None:
    """While a draft's rounds run, the step that judges them is launched before the last one's tokens are sent."""
    made, waited = turns(clock, 1), 0
    name = made.world.open([1, 2, 3], 60)
    while (step := made.steps.plan_step()) is not None:
        made.steps.finish_step(step, made.execute(step))
        told = 3 + sum(len(commit.tokens) for commit in made.world.commits[name])
        session = made.world.sessions.get(name)
        if session is not None:
            waits = isinstance(step, VerifyStep) and made.steps._launched is not None
            assert (told < len(session.tokens)) == waits
            waited += waits
        else:  # the last tokens do not wait
            assert made.world.commits[name][-1].finish_reason is m.FinishReason.LENGTH
    assert waited > 5
    made.world.check_greedy(name)


def test_the_models_take_turns_while_both_have_something_to_do(clock: Clock) -> None:
    """A long prompt is read by both, by the draft once the target has, and rounds of other sessions go on beside."""
    made = turns(clock, 2, prefill_chunk=16)
    made.world.open([1, 2, 3], 60)
    made.world.open([*range(30)] * 5, 20)
    made.run()
    drafting = [kind == "draft" for kind in made.kinds]
    last = len(drafting) - drafting[::-1].index(True)
    assert sum(drafting) > 15
    pairs = list(pairwise(drafting[1:last]))
    assert sum(a != b for a, b in pairs) > 0.8 * len(pairs), made.kinds
    made.check_nothing_left()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), aborted=st.sets(st.integers(0, 5)), pages=st.sampled_from([14, 30, 200]))
def test_sessions_come_and_go(seed: int, aborted: set[int], pages: int) -> None:
    """With room at the draft for some of them at a time, too, and alternatives beside what is drafted."""
    rng = random.Random(seed)
    made = turns(Clock(), seed, FakeModel(agreement=3, swaps=True), draft_pages=pages, gamma=rng.choice([1, 3, 4]))
    made.world.target.beside = rng.choice([0, 2])
    names = [made.world.open(prompt, rng.choice([3, 25])) for prompt in prompts(made.world.rng, 6, longest=90)]
    for number in aborted:
        made.world.script += [lambda: None] * rng.randrange(8) + [lambda name=names[number]: made.world.abort(name)]
    made.run()
    for number, name in enumerate(names):
        if number not in aborted or made.world.ended(name):
            made.world.check_greedy(name)
    made.check_nothing_left()


def test_a_step_behind_rounds_reads_what_they_announce(clock: Clock) -> None:
    """As much in each round as where the host brings it."""
    reads = []
    for chains in (True, False):
        plan = replace(PLAN, budget=0.3, group_size=0)
        made = turns(clock, 3, FakeModel(ends=True, agreement=3, recent=1), chains, plan=plan)
        name = made.world.open([3] * 150, 60, exactness=m.Exactness.APPROXIMATE)
        made.run()
        made.world.check_greedy(name)
        reads.append(
            [
                (each.figures.kv_tokens_read, each.figures.kv_tokens_total)
                for each in made.world.commits[name]
                if each.drafted
            ]
        )
        assert (made.world.verifier.counters["steps_chained_to_rounds"] > 5) == chains
    assert reads[0] == reads[1]
    assert all(0 < read < total for read, total in reads[0][1:])


@pytest.mark.parametrize("screening", [0, 3, 4])
@pytest.mark.parametrize("agreement", [1, 4])
@pytest.mark.parametrize(("chains", "beside"), [(True, 3), (True, 0), (False, 0)])
def test_three_levels_give_what_plain_decoding_gives(
    clock: Clock, screening: int, agreement: int, chains: bool, beside: int
) -> None:
    """The dense passes that confirm run behind the draft's rounds as well, and rounds behind them. What they reject the
    draft takes back without reading its text anew.
    """
    model = Screens(agreement=agreement, screening=screening, swaps=True)
    how = {"hold": 11, "runner": ScreeningRunner, "screening_quantization": "fp8"}
    made = turns(clock, 1, model, chains, **how)
    made.world.target.sparse_logits, made.world.target.beside = model.sparse, beside
    begins = count_begins(made)
    names = [made.world.open([3 + i] * (60 + 30 * i), 150) for i in range(3)]

    def check() -> None:
        check_screened_kv(made.world)
        under_way = made.world.verifier.under_way
        for item in under_way.rounds if under_way is not None else []:
            assert not item.is_void
            assert item.input.light == all(each.screens for each in under_way.rounds)

    made.world.script = [check] * 1500
    made.run()
    for name in names:
        made.world.check_greedy(name)
    counters = made.world.verifier.counters
    behind, screened, confirmed = (
        counters[name] for name in ("steps_chained_to_rounds", "screened_tokens", "confirmed_tokens")
    )
    assert screened > 30 and counters["announced_bytes"] == 0
    assert (confirmed == screened) == (screening == 4)
    assert (behind > 0) == chains
    if chains and screening == agreement == 4:
        assert counters["rounds_chained_to_steps"] > made.kinds.count("draft") / 3, made.kinds
    assert (counters["accepted_alternatives"] > 0) == (chains and beside > 0 and agreement < 4)
    assert counters["draft_timeouts"] == counters["rejected_events"] == 0
    # A draft that is paused is released, and one whose text ended with held tokens, and begins again.
    assert begins["begins"] <= 3 + begins["ends"]
    made.check_nothing_left()


def count_begins(made: Turns) -> Counter[str]:
    """Return a count of how often the target has its draft begin or end with a session before that is over."""
    counted, tell = Counter[str](), made.steps._draft.send

    def note(event: m.TargetEvent) -> None:
        counted["begins"] += isinstance(event, m.Begin)
        counted["ends"] += isinstance(event, m.End)
        tell(event)

    made.steps._draft.send = note
    return counted


def test_sampled_tokens_have_the_targets_distribution(clock: Clock) -> None:
    """The second token is drafted and judged, given the first, and the third, given both."""
    model, sampling = FakeModel(agreement=2), RULED["plain"]
    made = turns(clock, 5, model, prefill_chunk=512)
    names = [made.world.open(PROMPT, 3, replace(sampling, seed=seed), STOPS) for seed in range(600)]
    made.run()
    drafted, accepted = totals(made.world)
    assert drafted > 550 and 0.1 < accepted / drafted < 0.9
    assert made.world.verifier.counters["steps_chained_to_rounds"] > 10
    check_distribution(made.world, names, PROMPT, sampling)


def test_a_draft_step_that_fails_costs_no_token(clock: Clock) -> None:
    made = turns(clock)
    name = made.world.open([1, 2, 3], 30)
    drafts = made.world.drafter.runner.draft_rounds
    calls = []

    def fail_once(requests: list) -> list:
        calls.append(len(requests))
        if len(calls) == 3:
            raise RuntimeError("no room for a round")
        return drafts(requests)

    made.world.drafter.runner.draft_rounds = fail_once

    async def serve() -> None:
        def plan() -> Step | None:
            if not made.world.busy():
                raise EOFError
            return made.steps.plan_step()

        steps = SimpleNamespace(
            plan_step=plan,
            execute=made.steps.execute,
            finish_step=made.steps.finish_step,
            fail_step=made.steps.fail_step,
            next_deadline=made.steps.next_deadline,
        )
        await run_step_loop(steps, asyncio.Event(), 60, sends_first=False)

    with pytest.raises(EOFError):
        asyncio.run(serve())
    made.world.check_greedy(name)
    assert made.world.drafter.counters["failed_steps"] == 1
    assert made.world.verifier.counters["plain_rounds"] > 0
    made.run()
    made.check_nothing_left()


def test_what_a_draft_says_wrongly_ends_the_drafting_of_its_session_alone(clock: Clock) -> None:
    made = turns(clock)
    name = made.world.open([1, 2, 3], 30)
    send = made.steps._target.send
    said: list[m.DraftEvent] = []

    def garble(event: m.DraftEvent) -> None:
        said.append(event)
        wrong = isinstance(event, m.Proposals) and len(said) == 4
        send(replace(event, tokens=[VOCAB] * len(event.tokens)) if wrong else event)

    made.steps._target.send = garble
    made.run()
    made.world.check_greedy(name)
    assert made.world.verifier.counters["rejected_events"] == 1
    made.check_nothing_left()


# Opening.


def both(tokens: int = 0, memory: float = 0.0) -> TargetSettings:
    sizes = {"kv_tokens": tokens, "kv_memory": memory, "max_context": 300, "max_sessions": 2}
    return target_settings(device="cpu", placement="together", gamma=3, **sizes)


def test_both_models_have_room_for_the_same_sessions() -> None:
    target, draft = open_both(both(2000), both(2000).own_draft, "none", "none", ALONE, lambda: None)
    assert target.shape.num_layers != draft.shape.num_layers
    room, own = draft.runner.kv.pool.num_pages, target.runner.kv.pool.num_pages
    assert own == 125
    assert own < room <= own + 2 * 2  # a round behind each session


def test_they_share_the_memory_for_kv() -> None:
    target, draft = (load_shape(str(path)) for path in (models.TARGET, models.DRAFT))
    a_token = bytes_of_token(draft, torch.float32)
    settings = replace(both(memory=0.004), max_context=64, max_sessions=64)
    alone, shared = (room_for_kv(settings, target, torch.float32, "cpu", beside) for beside in (0, a_token))
    own = bytes_of_token(target, torch.float32)
    assert alone > shared > 64
    assert shared * (own + a_token) <= 0.004 * 2**30 < (shared + 1) * (own + a_token)


def test_the_draft_in_a_target_drafts_as_the_settings_say() -> None:
    settings = target_settings(
        placement="together", draft_read_share=0.2, gamma=6, deterministic=True, name="target-2", device="cuda"
    )
    draft = settings.own_draft
    chosen = draft.chosen
    assert (draft.model, chosen.draft_read_share, chosen.gamma) == (str(models.DRAFT), 0.2, 6)
    assert chosen.branches == 0 and not draft.deterministic


@pytest.mark.parametrize(
    ("change", "message"),
    [({"draft": "lookup"}, "expected a model's id or folder"), ({"host_kv_memory": 1.0}, "not built with host_kv")],
)
def test_settings_that_do_not_go_with_it_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        target_settings(placement="together", **change)
