"""Agents that take turns, on virtual time: a service that has answered short requests drafts their turns at once."""

import itertools
import operator
from heapq import heappop, heappush
from random import Random
from statistics import median
from typing import Any

import pytest

from specahead.lab.benchmarks.scripted import VOCAB
from specahead.wire import messages as m
from target_service.planning import MUCH, StepPlanner
from target_service.verify_step import VerifyStep
from tests.unit.clock import Clock
from tests.unit.timed_models import TimedTarget

AGENTS, TURNS, ADDED, GENERATED, PAUSE = 6, 4, 1500, 200, 0.3
SCREENED = {"hold": None, "confirmation": 0.989, "screening_quantization": "fp8"}


def take_turns(served: TimedTarget, exactness: m.Exactness, agents: int = AGENTS) -> tuple[float, list[float]]:
    """Return the seconds that all turns took, and how long each later turn waited for its first token."""
    clock, random, verifier = served.clock, Random(1), served.verifier
    began, waits = clock.now, list[float]()
    texts = [[random.randrange(VOCAB) for _ in range(6000 * (2 + agent * AGENTS // agents))] for agent in range(agents)]
    turns = [(clock.now, agent, 0) for agent in range(agents)]
    asked: dict[str, tuple[float, int, int, list[int]]] = {}
    emit = served._emit

    def take(event: m.ServedEvent) -> None:
        emit(event)
        at, agent, turn, answer = asked[event.at.session]
        if turn and not answer:
            waits.append(clock.now - at)
        answer += event.tokens
        if event.finish_reason is not m.FinishReason.NONE and turn + 1 < TURNS:
            texts[agent] += [*answer, *(random.randrange(VOCAB) for _ in range(ADDED))]
            heappush(turns, (clock.now + PAUSE, agent, turn + 1))

    served._emit = take
    while turns or not verifier.is_idle:
        if verifier.is_idle:
            clock.now = max(clock.now, turns[0][0])
        while turns and turns[0][0] <= clock.now:
            at, agent, turn = heappop(turns)
            asked[served.open(texts[agent], GENERATED, exactness)] = at, agent, turn, []
        served._run_step()
    return clock.now - began, waits


@pytest.mark.parametrize("exactness", m.Exactness)
def test_turns_are_drafted_from_the_first_one(every_clock: Clock, exactness: m.Exactness) -> None:
    """First tokens of later turns come within a quarter of a second, although all agents ask at about the same time."""
    seconds = []
    for drafts in (True, False):
        served = TimedTarget(every_clock, 32, 60_000, 0.8, **SCREENED)
        if not drafts:
            served.leave_out_draft()
        served.answer([(0.0, [index] * 3000, 24, exactness) for index in range(8)])
        whole, waits = take_turns(served, exactness)
        seconds.append(whole)
        print(f"{exactness.name}, drafted {drafts}: {whole:.2f} s, first tokens {median(waits):.3f} s")
        assert len(waits) == AGENTS * (TURNS - 1) and median(waits) < 0.25
    assert seconds[0] < 0.75 * seconds[1]


def test_approximate_turns_come_no_later_than_exact_ones(every_clock: Clock) -> None:
    """A draft in the target would read whole contexts for its announcements: where exact rounds are about as fast, and
    leave these out, approximate requests are served exactly.
    """
    seconds, first = [], []
    for exactness in (m.Exactness.EXACT, m.Exactness.APPROXIMATE):
        served = TimedTarget(every_clock, 32, 60_000, 0.8, **SCREENED)
        whole, waits = take_turns(served, exactness, 2 * AGENTS)
        seconds.append(whole)
        first.append(median(waits))
        assert served.verifier.counters["screening_rounds"] > 0
    print(f"exact {seconds[0]:.2f} s, approximate {seconds[1]:.2f} s; first tokens {first[0]:.3f} s, {first[1]:.3f} s")
    assert seconds[1] <= 1.01 * seconds[0] and first[1] <= 1.01 * first[0]


def test_sessions_go_on_between_long_prompts(every_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step over much of other prompts follows a step of rounds alone, if there are sessions that go on."""
    steps, plan = list[tuple[bool, bool]](), StepPlanner.plan

    def planned(planner: StepPlanner, *given: Any) -> VerifyStep | None:
        step = plan(planner, *given)
        if step is not None:
            steps.append((sum(count for _, count in step.prompt_tokens) > MUCH, bool(step.rounds)))
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
        while any(name in served.verifier.admission.running or served.verifier.admission.queue for name in names):
            served._run_step()
        much = [reads for reads, _ in steps]
        assert sum(much) >= 3
        assert any(itertools.starmap(operator.and_, itertools.pairwise(much))) == (not others), steps
