"""Agents that take turns, on virtual time: a service that has answered short requests drafts their turns at once."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from statistics import fmean, median
from typing import Any

import pytest

from draft_service.drafter import Drafter
from draft_service.steps import DraftStep, DraftStepResult
from specahead.lab.benchmarks.scripted import VOCAB
from specahead.wire import messages as m
from target_service.draft_in_target import MOST_HELD, TOGETHER, StepsByTurns
from target_service.planning import MUCH, StepPlanner
from target_service.verify_step import VerifyStep
from tests.unit.clock import Clock
from tests.unit.timed_models import TimedTarget

AGENTS, TURNS, PAUSE = 6, 4, 0.3
CONTEXTS = range(12_000, 48_000, 6000)
SCREENED = {"hold": None, "confirmation": 0.989, "screening_quantization": "fp8"}


@dataclass(frozen=True)
class Turns:
    """Seconds that turns take."""

    whole: float
    """From the first turn's beginning to the last one's end."""
    waits: list[float]
    """Of each later turn, until its first token."""
    lasts: list[float]
    """Of each later turn, until its end."""


def take_turns(
    served: TimedTarget,
    exactness: m.Exactness,
    contexts: Sequence[int] = CONTEXTS,
    added: int = 1500,
    generated: int = 200,
    varied: float = 0.0,
) -> Turns:
    """Have agents take turns, with `added` new tokens of the prompt and `generated` of the answer.

    contexts: tokens of each agent's first prompt. varied: the share by which pauses between turns differ from PAUSE.
    """
    clock, random, verifier = served.clock, Random(1), served.verifier
    began, waits, lasts = clock.now, list[float](), list[float]()
    texts = [[random.randrange(VOCAB) for _ in range(context)] for context in contexts]
    turns = [(clock.now, agent, 0) for agent in range(len(texts))]
    asked: dict[str, tuple[float, int, int, list[int]]] = {}
    emit = served._emit

    def take(event: m.ServedEvent) -> None:
        emit(event)
        at, agent, turn, answer = asked[event.at.session]
        if turn and not answer:
            waits.append(clock.now - at)
        answer += event.tokens
        if event.finish_reason is m.FinishReason.NONE:
            return
        if turn:
            lasts.append(clock.now - at)
        if turn + 1 < TURNS:
            texts[agent] += [*answer, *(random.randrange(VOCAB) for _ in range(added))]
            heappush(turns, (clock.now + PAUSE * random.uniform(1 - varied, 1 + varied), agent, turn + 1))

    served._emit = take
    while turns or not verifier.is_idle:
        if verifier.is_idle:
            clock.now = max(clock.now, turns[0][0])
        while turns and turns[0][0] <= clock.now:
            at, agent, turn = heappop(turns)
            asked[served.open(texts[agent], generated, exactness)] = at, agent, turn, []
        served._run_step()
    return Turns(clock.now - began, waits, lasts)


@pytest.mark.parametrize("exactness", m.Exactness)
def test_turns_are_drafted_from_the_first_one(every_clock: Clock, exactness: m.Exactness) -> None:
    """First tokens of later turns come within a quarter of a second, although all agents ask at about the same time."""
    seconds = []
    for drafts in (True, False):
        served = TimedTarget(every_clock, 32, 60_000, 0.8, **SCREENED)
        if not drafts:
            served.leave_out_draft()
        served.answer([(0.0, [index] * 3000, 24, exactness) for index in range(8)])
        turns = take_turns(served, exactness)
        seconds.append(turns.whole)
        print(f"{exactness.name}, drafted {drafts}: {turns.whole:.2f} s, first tokens {median(turns.waits):.3f} s")
        assert len(turns.waits) == AGENTS * (TURNS - 1) and median(turns.waits) < 0.25
    assert seconds[0] < 0.75 * seconds[1]


def test_approximate_turns_come_no_later_than_exact_ones(every_clock: Clock) -> None:
    """A draft in the target would read whole contexts for its announcements: where exact rounds are about as fast, and
    leave these out, approximate requests are served exactly.
    """
    seconds, first = [], []
    for exactness in (m.Exactness.EXACT, m.Exactness.APPROXIMATE):
        served = TimedTarget(every_clock, 32, 60_000, 0.8, **SCREENED)
        turns = take_turns(served, exactness, sorted([*CONTEXTS, *CONTEXTS]))
        seconds.append(turns.whole)
        first.append(median(turns.waits))
        assert served.verifier.counters["screening_rounds"] > 0
    print(f"exact {seconds[0]:.2f} s, approximate {seconds[1]:.2f} s; first tokens {first[0]:.3f} s, {first[1]:.3f} s")
    assert seconds[1] <= 1.01 * seconds[0] and first[1] <= 1.01 * first[0]


def test_sessions_go_on_between_long_prompts(every_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long prompt waits, every second step over much of short ones follows a step of rounds alone, if there are
    sessions that go on.
    """
    steps, plan = list[bool](), StepPlanner.plan

    def planned(planner: StepPlanner, *given: Any) -> VerifyStep | None:
        step = plan(planner, *given)
        if step is not None:
            steps.append(MUCH < sum(count for _, count in step.prompt_tokens) <= 2048)
        return step

    monkeypatch.setattr(StepPlanner, "plan", planned)
    served = TimedTarget(every_clock, 32, 60_000, 0.8)
    for others in (False, True):
        steps.clear()
        if others:
            served.open([9] * 50, 4000, m.Exactness.EXACT)
            for _ in range(20):
                served._run_step()
            steps.clear()
        names = [served.open([10 * (1 + others) + place] * 1900, 2, m.Exactness.EXACT) for place in range(4)]
        served.open([20 + others] * 40_000, 2, m.Exactness.EXACT)
        while any(name in served.verifier.admission.running or served.verifier.admission.queue for name in names):
            served._run_step()
        assert sum(steps) >= 3
        assert any(itertools.starmap(operator.and_, itertools.pairwise(steps))) == (not others), steps


def test_the_prompts_of_turns_that_come_together_queue_less(
    every_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that all begin to generate at once end at once, and send their next prompts at once."""
    spaced, at_once = _spaced_and_not(every_clock, monkeypatch, agents=12)
    print(f"first tokens {_percentile_95(spaced.waits):.3f} s, at once {_percentile_95(at_once.waits):.3f} s")
    assert _percentile_95(spaced.waits) < 0.75 * _percentile_95(at_once.waits) and median(spaced.waits) < 0.9 * median(
        at_once.waits
    )
    assert spaced.whole <= 1.01 * at_once.whole and fmean(spaced.lasts) <= 1.01 * fmean(at_once.lasts)


@pytest.mark.parametrize(
    ("agents", "added", "generated", "varied"),
    [
        (1, 1500, 200, 0.0),
        (4, 1500, 6, 0.0),
        (2, 1500, 200, 0.0),
        (6, 1500, 16, 0.5),
        (6, 8000, 60, 0.0),
        (12, 300, 60, 0.5),
        (24, 1500, 60, 0.5),
    ],
)
def test_no_turn_waits_long_for_the_rounds_of_others(
    every_clock: Clock, monkeypatch: pytest.MonkeyPatch, agents: int, added: int, generated: int, varied: float
) -> None:
    """Beside turns that all begin at once, they are no later on average, and one by MOST_HELD at most."""
    spaced, at_once = _spaced_and_not(every_clock, monkeypatch, agents, added, generated, varied)
    assert fmean(spaced.lasts) <= 1.02 * fmean(at_once.lasts)
    assert max(spaced.lasts) <= max(at_once.lasts) + MOST_HELD


def test_two_turns_begin_at_once_and_none_that_generates_waits(
    every_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, steps, execute = TimedTarget(every_clock, 32, 60_000, 0.8), list[int](), Drafter.execute

    def executed(drafter: Drafter, step: DraftStep) -> DraftStepResult:
        steps.append(len(step.inputs))
        return execute(drafter, step)

    monkeypatch.setattr(Drafter, "execute", executed)
    for rest in (0, 300):
        for place in range(5):
            served.open([place] * (6000 + rest), 40, m.Exactness.EXACT)
        steps.clear()
        begun = set[int]()
        while not served.verifier.is_idle:
            served._run_step()
            running = served.verifier.admission.running
            drafted = [each for each in served._steps.drafter.admission.sessions if each.id in running]
            begun |= {running[each.id].round for each in drafted if served._steps._begins_turn(each)}
        assert begun == ({1} if rest else set())
    assert [count for count in steps if count][:2] == [TOGETHER, TOGETHER]


def _percentile_95(waits: Sequence[float]) -> float:
    return sorted(waits)[int(0.95 * len(waits))]


def _spaced_and_not(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    agents: int,
    added: int = 1500,
    generated: int = 200,
    varied: float = 0.0,
) -> list[Turns]:
    """Return the turns of agents that begin together, as they are and as if all might begin to generate at once."""
    both = list[Turns]()
    for may_wait in (True, False):
        if not may_wait:
            monkeypatch.setattr(StepsByTurns, "_begins_turn", lambda steps, session: False)
        served = TimedTarget(clock, 32, 60_000, 0.8, **SCREENED)
        served.answer([(0.0, [index] * 3000, 24, m.Exactness.EXACT) for index in range(8)])
        both.append(take_turns(served, m.Exactness.EXACT, [6000] * agents, added, generated, varied))
    return both
