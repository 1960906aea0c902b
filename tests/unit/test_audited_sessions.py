"""Which rounds of which sessions are audited, and how much each session reads by what is found."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.wire import messages as m
from target_service.auditing import DOUBTED_ROUNDS
from target_service.policy import Load
from target_service.session import TargetSession
from tests.unit import fake_models
from tests.unit.clock import Clock
from tests.unit.fake_models import FakeModel, FakeRunner
from tests.unit.test_draft_in_target import Turns
from tests.unit.world import World, prompts

PLAN = replace(fake_models.PLAN, budget=0.1)


class AuditedRunner(FakeRunner):
    """Says of audited rounds how far they diverge, given what the session reads more than by the plan."""

    diverges: Callable[[str, float], float]
    sessions: Callable[[], dict[str, TargetSession]]

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        outputs = super().forward(inputs)
        for item, output in zip(inputs, outputs, strict=True):
            if item.audit is not None:
                assert item.read is None
                (session,) = [each for each in self.sessions().values() if each.kv is item.kv]
                value = self.diverges(session.id, session.reading.audit.applied)
                output.divergence = np.array([[value, 2 * value, value < 0.5]] * len(item.tokens), np.float32)
        return outputs


def audited(
    clock: Clock, diverges: Callable[[str, float], float], sessions: int = 1, tokens: int = 400, **audits: float | None
) -> tuple[World, list[str]]:
    model = FakeModel(True, agreement=3, recent=1)
    how = {"audit_share": None, "max_divergence": 0.2} | audits
    world = World(clock, 1, model, PLAN, runner=AuditedRunner, audits=how, max_context=600, draft_context=600)
    assert isinstance(world.target, AuditedRunner)
    world.target.diverges, world.target.sessions = diverges, lambda: world.sessions
    world.attach()
    names = [world.open(prompt, tokens, exactness=m.Exactness.APPROXIMATE) for prompt in prompts(world.rng, sessions)]
    return world, names


def audits_of(world: World, name: str) -> list[int]:
    """Return the numbers of a session's audited rounds."""
    return [i for i, commit in enumerate(world.commits[name]) if commit.figures.audited_tokens]


def test_audits_are_few_and_cost_nothing_else(clock: Clock) -> None:
    """They come after 4, 8, 16 and 32 steps, and then after 50 or more; a share of 0 makes none."""
    world, (name,) = audited(clock, lambda _name, _factor: 0.01)
    world.run()
    rounds = audits_of(world, name)
    assert 3 <= len(rounds) <= 6 and rounds[0] < 8
    gaps = np.diff(rounds)
    assert (gaps[1:] > 1.5 * gaps[:-1]).all()
    assert world.verifier.counters["audited_rounds"] == len(rounds)
    assert world.verifier.counters["raised_budgets"] == 0
    gauges = world.verifier.gauges
    assert gauges["audit_total_variation"] == pytest.approx(0.01)
    assert gauges["audit_kl_divergence"] == pytest.approx(0.02)
    assert (gauges["audit_same_greedy"], gauges["audit_max_divergence"]) == (1, 0.2)
    assert 0 < gauges["audit_bound"] < 0.2
    world.check_nothing_left()
    silent, (name,) = audited(clock, lambda _name, _factor: 1.0, audit_share=0.0)
    silent.run()
    assert not audits_of(silent, name) and silent.verifier.counters["audited_rounds"] == 0


def test_the_answer_sums_up_what_audits_found(clock: Clock) -> None:
    world, (name,) = audited(clock, lambda _name, _factor: 0.01, audit_share=0.1)
    world.run()
    totals = world.ledger.records[name].totals
    assert totals.figures.audited_tokens >= len(audits_of(world, name)) > 8
    said = totals.summary()
    assert said["total_variation"] == pytest.approx(0.01) and said["kl_divergence"] == pytest.approx(0.02)
    assert (said["same_greedy"], said["rounds_made_exact"]) == (1, 0)


def test_sessions_audit_in_the_same_steps(clock: Clock) -> None:
    world, _ = audited(clock, lambda _name, _factor: 0.01, sessions=4, tokens=150, audit_share=0.1)
    steps = []
    plan_step = world.verifier.plan_step

    def watched() -> object:
        step = plan_step()
        if step is not None:
            reads = [item.input.read for item in step.rounds]
            sparse = sum(read is not None and not read.reads_all for read in reads)
            steps.append((sparse, sum(item.input.audit is not None for item in step.rounds)))
        return step

    world.verifier.plan_step = watched
    world.run()
    with_audits = [sparse for sparse, count in steps if count]
    assert len(with_audits) > 3 and not any(with_audits), "all or none"
    assert max(count for _, count in steps) > 1


def test_a_session_that_diverges_reads_more_and_the_others_do_not(clock: Clock) -> None:
    """It falls with what it reads: it settles where that is held, and is audited often for a while."""
    first = "s0"
    world, names = audited(
        clock, lambda name, factor: 0.5 / factor**2 if name == first else 0.0, sessions=3, audit_share=0.1
    )
    budgets: dict[str, float] = {}
    world.script = []
    while world.happen():
        for name, session in world.sessions.items():
            assert session.reading.audit is not None and session.reading.reader is not None
            budgets[name] = session.reading.reader.plan.budget
    assert budgets[first] > 2 * PLAN.budget
    assert all(budgets[name] == PLAN.budget for name in names if name != first)
    counters = world.verifier.counters
    assert counters["raised_budgets"] >= 2
    rounds = audits_of(world, first)
    assert rounds[1 : 1 + DOUBTED_ROUNDS] == [*range(rounds[0] + 1, rounds[0] + 1 + DOUBTED_ROUNDS)]
    assert len(rounds) < len(world.commits[first]) / 2, "and then as seldom as the others"
    assert world.ledger.records[first].totals.kv_read_fraction > world.ledger.records["s1"].totals.kv_read_fraction


def test_a_session_that_cannot_be_held_becomes_exact(clock: Clock) -> None:
    """From then on it reads everything to its end, nothing is announced, and it is not audited any more."""
    world, (name,) = audited(clock, lambda _name, _factor: 1.0)
    world.run()
    commits = world.commits[name]
    exact = [commit.figures.rounds_made_exact for commit in commits]
    since = exact.index(1)
    assert all(exact[since:]) and 0 < since < len(exact) / 2
    assert all(commit.figures.kv_tokens_read == commit.figures.kv_tokens_total for commit in commits[since + 1 :])
    assert sum(commit.figures.announced_bytes for commit in commits[since + 2 :]) == 0
    assert max(audits_of(world, name)) <= since
    assert world.verifier.counters["sessions_made_exact"] == 1
    assert world.ledger.records[name].totals.summary()["rounds_made_exact"] == sum(exact)
    world.check_nothing_left()


def test_a_wrong_plan_is_found_out_by_all_sessions_together(clock: Clock) -> None:
    """Sessions of a few rounds, each of which sees an audit or two, are begun with more after some have diverged."""
    world, _ = audited(clock, lambda _name, factor: 0.6 / factor, sessions=24, tokens=60, audit_share=0.2)
    world.run()
    assert world.verifier.gauges["audit_budget_factor"] >= 2
    late = world.open(prompts(world.rng, 1)[0], 60, exactness=m.Exactness.APPROXIMATE)
    world.target_side.dirty = True
    while late not in world.sessions:
        assert world.happen()
    reader = world.sessions[late].reading.reader
    assert reader is not None and reader.plan.budget >= 2 * PLAN.budget
    world.run()


def test_a_limit_of_1_only_counts(clock: Clock) -> None:
    world, (name,) = audited(clock, lambda _name, _factor: 1.0, max_divergence=1.0)
    world.run()
    assert audits_of(world, name) and world.verifier.counters["raised_budgets"] == 0


def test_the_policy_says_how_often(clock: Clock) -> None:
    """Where a dense round takes three times as long as a sparse one, there are three times fewer audits than 2 %."""
    world, _ = audited(clock, lambda _name, _factor: 0.0)
    auditor, load = world.verifier._auditor, Load(1, 100, announcing=100)
    for ratio, wanted in ((0.5, 50), (1.0, 50), (3.0, 150)):
        auditor._dense_per_sparse = lambda _load, ratio=ratio: ratio
        assert auditor._usual(load) == wanted
    ratio = world.verifier.policy.dense_per_sparse(Load(1, 30_000, announcing=30_000))
    assert 1.5 < ratio < 1 / PLAN.budget, "by sizes: the draft's part is the same in both"


@pytest.mark.parametrize("chains", [True, False])
def test_a_draft_in_the_target_is_audited_too(clock: Clock, chains: bool) -> None:
    """A step with an audit waits for the host; the others are launched behind the draft's rounds as before."""
    world, (name,) = audited(clock, lambda _name, _factor: 0.01, audit_share=0.1)
    world.verifier.protocol.detach(world.links[0].target_end)
    world.drafter.detach(world.links[0].draft_end)
    world.target.chains_rounds = world.draft.chains_rounds = chains
    made = Turns(world)
    made.run()
    rounds = audits_of(world, name)
    assert len(rounds) > 8
    assert (world.verifier.counters["steps_chained_to_rounds"] > 3 * len(rounds)) == chains
    made.check_nothing_left()
