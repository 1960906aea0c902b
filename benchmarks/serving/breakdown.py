"""What a session's round waits for, from the timelines of both services: no moment counted twice, none left out.

A round lasts from one commit of its session to the next. Its way: the verdict travels to the draft, waits until the
draft is done with other sessions, the round is drafted and said, the proposal travels to the target, waits for the
target's step under way, is verified, committed. What lies before the round began, since it was drafted ahead, counts
nothing.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

from benchmarks.serving.timeline import RoundKey, StepTimes, Timeline


@dataclass(frozen=True)
class RoundParts:
    """Milliseconds of a mean round of a session.

    wire: from what one side hands to its sender to where the other side takes it, both ways. others_drafting,
    others_verifying: waits for a step of other sessions, or for the side to take the round up. draft_gpu, verify_gpu:
    the model ran. draft_host, target_host: the rest of the round's own steps, planning and finishing included.
    """

    wire: float = 0.0
    others_drafting: float = 0.0
    draft_host: float = 0.0
    draft_gpu: float = 0.0
    others_verifying: float = 0.0
    target_host: float = 0.0
    verify_gpu: float = 0.0

    @property
    def whole(self) -> float:
        """The round."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Breakdown:
    """Of a row's window. rounds: how many the parts are the mean of. target_idle, draft_idle: the share of the window
    in which the service's model did not run."""

    rounds: int
    parts: RoundParts
    target_idle: float
    draft_idle: float


def break_down(target: Timeline, draft: Timeline, began: float, ended: float) -> Breakdown:
    """Return the parts of all rounds that lie between `began` and `ended`, in seconds on the services' clock."""
    proposals, verdicts = _by_round(target), _by_round(draft)
    drafted: dict[tuple[str, int], list[tuple[StepTimes, int]]] = defaultdict(list)
    for step in draft.steps:
        for session, epoch, round_ in step.rounds:
            drafted[session, round_].append((step, epoch))
    sums: dict[str, float] = defaultdict(float)
    rounds = 0
    for key, start, step in _rounds(target, began, ended):
        rounds += 1
        at = start
        for part, until in _way(key, step, proposals, verdicts, drafted[key[0], key[2]]):
            until = min(max(until, at), step.finished)
            sums[part] += until - at
            at = until
    parts = RoundParts(**{part: 1e3 * seconds / rounds for part, seconds in sums.items()})
    return Breakdown(rounds, parts, _idle(target.steps, began, ended), _idle(draft.steps, began, ended))


def _by_round(timeline: Timeline) -> dict[tuple[str, int], list[tuple[float, int]]]:
    """Return when the messages of each session's round came, each with its epoch, in order."""
    arrivals = defaultdict(list)
    for (session, epoch, round_), at in timeline.arrivals:
        arrivals[session, round_].append((at, epoch))
    return arrivals


def _rounds(target: Timeline, began: float, ended: float) -> Iterator[tuple[RoundKey, float, StepTimes]]:
    """Yield each round in the window, when it began, and the target's step that ended it."""
    steps: dict[str, list[tuple[RoundKey, StepTimes]]] = defaultdict(list)
    for step in target.steps:
        for key in step.rounds:
            steps[key[0]].append((key, step))
    for of_session in steps.values():
        for (_, before), (key, step) in pairwise(of_session):
            if began <= before.finished and step.finished <= ended:
                yield key, before.finished, step


def _way(
    key: RoundKey,
    step: StepTimes,
    proposals: dict[tuple[str, int], list[tuple[float, int]]],
    verdicts: dict[tuple[str, int], list[tuple[float, int]]],
    drafted: list[tuple[StepTimes, int]],
) -> Iterator[tuple[str, float]]:
    """Yield a round's parts in order, each with the moment at which it ends; moments may lie before the round."""
    session, epoch, round_ = key
    arrived = [at for at, of in proposals.get((session, round_), []) if of == epoch and at <= step.began]
    before = [(each, of) for each, of in drafted if arrived and each.planned <= arrived[0]]
    if before:
        drafting, drafted_in = before[-1]
        opened = [at for at, _ in verdicts.get((session, round_), []) if at <= arrived[0]]
        # Drafted in an earlier epoch, the round still held and was said again when its verdict came.
        if opened and (drafted_in != epoch or opened[-1] <= drafting.planned):
            yield "wire", opened[-1]
        if drafted_in == epoch:
            yield "others_drafting", drafting.planned
            yield from _step_parts(drafting, "draft_host", "draft_gpu")
        yield "wire", arrived[0]
    yield "others_verifying", step.planned
    yield from _step_parts(step, "target_host", "verify_gpu")


def _step_parts(step: StepTimes, host: str, gpu: str) -> Iterator[tuple[str, float]]:
    yield host, step.began + (1 - step.gpu_share) * (step.ended - step.began)
    yield gpu, step.ended
    yield host, step.finished


def _idle(steps: list[StepTimes], began: float, ended: float) -> float:
    """Return the share of a window in which the model did not run."""
    first = bisect_right([step.ended for step in steps], began)
    busy = sum(step.gpu_share * max(0.0, min(step.ended, ended) - max(step.began, began)) for step in steps[first:])
    return max(0.0, 1 - busy / (ended - began))
