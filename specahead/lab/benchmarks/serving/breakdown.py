"""What a session's round waits for, from the timelines of both services. Each moment counts exactly once.

A round lasts from one commit of its session to the next: the verdict travels to the draft and waits until the draft is
done with other sessions; the round is drafted; the proposal travels to the target, waits for the step that runs there,
is verified and committed. Work that was done before the round began, because drafting overlapped, does not count.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from specahead.lab.benchmarks.serving.timeline import RoundKey, StepTimes, Timeline


@dataclass(frozen=True)
class RoundParts:
    """Milliseconds of a mean round of a session."""

    wire: float = 0.0
    """From one side's sender to the other side's receiver, both ways."""
    others_drafting: float = 0.0
    """Waiting for a step of other sessions, or for the draft to take the round up."""
    draft_host: float = 0.0
    """Planning and finishing the round's own drafting, and launching it."""
    draft_gpu: float = 0.0
    """The draft model runs."""
    others_verifying: float = 0.0
    target_host: float = 0.0
    verify_gpu: float = 0.0

    @property
    def whole(self) -> float:
        """The round."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Breakdown:
    """The time in which all sessions of a run had rounds."""

    rounds: int
    """How many rounds the parts are the mean of."""
    parts: RoundParts
    target_idle: float
    """Share of the time in which the target's model did not run."""
    draft_idle: float
    met: float
    """Share of verdicts for which the next round was drafted already."""
    device_idle: float | None = None
    """Share of the time in which the device of both models ran neither; None: each has a device of its own."""


def break_down(target: Timeline, draft: Timeline | None, run: str, settled: int, one_device: bool = False) -> Breakdown:
    """Return the parts of the rounds of a run, whose sessions are named `run/…`, in the time in which all had rounds.

    draft: None if the run had none. settled: first rounds of each session, which do not count. one_device: whether both
    models run on one. Raises ValueError if there was no such time, or the draft's timeline has no round of the run.
    """
    sessions = list(_rounds_by_session(target, run).values())
    if not sessions or min(map(len, sessions)) <= settled:
        raise ValueError(f"{run}: expected more than {settled} rounds of every session in the target's timeline")
    if draft is not None and not _rounds_by_session(draft, run):
        raise ValueError(f"{run}: expected its rounds in the draft's timeline")
    draft = draft or Timeline()
    began = max(steps[settled - 1][1].finished for steps in sessions)
    ended = min(steps[-1][1].finished for steps in sessions)
    pairs = (pair for steps in sessions for pair in pairwise(steps))
    rounds = [
        (before.finished, key, step)
        for (_, before), (key, step) in pairs
        if began <= before.finished and step.finished <= ended
    ]
    if not rounds:
        raise ValueError(f"{run}: at no time did all sessions have rounds; give more --tokens")
    target_idle, draft_idle = _idle(target.steps, began, ended), _idle(draft.steps, began, ended)
    return Breakdown(
        rounds=len(rounds),
        parts=_mean_parts(rounds, target, draft),
        target_idle=target_idle,
        draft_idle=draft_idle,
        met=_share_met(rounds, draft),
        device_idle=max(0.0, target_idle + draft_idle - 1) if one_device else None,
    )


def time_shares(target: Timeline, draft: Timeline, began: float) -> dict[str, float]:
    """Return where the time went from `began` until the target's last step, in shares of it, by what ran.

    began: by time.perf_counter. Of services that run beside each other the shares may add up to more than 1. What no
    model's thread ran is the host's, or nothing was there to do.
    """
    steps = [step for step in target.steps if step.planned >= began]
    if not steps:
        raise ValueError("expected steps in the target's timeline")
    whole = steps[-1].finished - began
    shares = {}
    for side, of_side in (("target", steps), ("draft", [step for step in draft.steps if step.planned >= began])):
        for what, chosen in (("reads prompts", True), ("rounds", False)):
            seconds = sum(step.ended - step.began for step in of_side if bool(step.prompts) is chosen)
            shares[f"{side} {what}"] = seconds / whole
    return shares | {"rest": 1 - sum(shares.values())}


def _share_met(rounds: list[tuple[float, RoundKey, StepTimes]], draft: Timeline) -> float:
    """Return the share of rounds whose last drafting was planned before the verdict that they follow."""
    drafted: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in draft.steps:
        for session, _, round_ in step.rounds:
            drafted[session, round_].append(step.planned)
    last = [(began, [at for at in drafted[key[0], key[2]] if at <= step.began]) for began, key, step in rounds]
    return sum(bool(planned) and planned[-1] < began for began, planned in last) / len(last)


def _rounds_by_session(timeline: Timeline, run: str) -> dict[str, list[tuple[RoundKey, StepTimes]]]:
    """Return the rounds of each session of a run, in order, each with the step that ran it."""
    rounds = defaultdict(list)
    for step in timeline.steps:
        for key in step.rounds:
            if key[0].startswith(f"{run}/"):
                rounds[key[0]].append((key, step))
    return rounds


def _mean_parts(rounds: list[tuple[float, RoundKey, StepTimes]], target: Timeline, draft: Timeline) -> RoundParts:
    """rounds: when each began, and the target's step that ended it."""
    proposals, verdicts = _by_round(target), _by_round(draft)
    drafted: dict[tuple[str, int], list[tuple[StepTimes, int]]] = defaultdict(list)
    for step in draft.steps:
        for session, epoch, round_ in step.rounds:
            drafted[session, round_].append((step, epoch))
    sums: dict[str, float] = defaultdict(float)
    for at, key, step in rounds:
        for part, until in _way(key, step, proposals, verdicts, drafted[key[0], key[2]]):
            until = min(max(until, at), step.finished)
            sums[part] += until - at
            at = until
    return RoundParts(**{part: 1e3 * seconds / len(rounds) for part, seconds in sums.items()})


def _by_round(timeline: Timeline) -> dict[tuple[str, int], list[tuple[float, int]]]:
    """Return when the messages of each session's round came, each with its epoch, in order."""
    arrivals = defaultdict(list)
    for (session, epoch, round_), at in timeline.arrivals:
        arrivals[session, round_].append((at, epoch))
    return arrivals


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
    """Return the share of a window in which the model did not run.

    A step that was launched while another one ran has the device's time, which may be longer than its own.
    """
    first = bisect_right([step.ended for step in steps], began)
    inside = ((step, max(0.0, min(step.ended, ended) - max(step.ended - step.gpu, began))) for step in steps[first:])
    return max(0.0, 1 - sum(min(step.gpu, seconds) for step, seconds in inside) / (ended - began))
