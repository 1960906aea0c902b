"""The parts of services under measurement, which take the place of the deployed services' own."""

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draft_service import service as draft_service
from draft_service.drafter import Drafter
from draft_service.link import keep_link
from draft_service.sessions import TargetPeer
from draft_service.steps import DraftStep, DraftStepResult
from specahead.config import TargetSettings
from specahead.engine.steps.requests import RoundOutput
from specahead.engine.steps.step_loop import Steps
from specahead.lab.benchmarks.serving.imposed import CONFIRMATION, ImposedVerdicts, foreseeing
from specahead.lab.benchmarks.serving.timeline import Recorder, RoundKey, TimedSteps, timeline_of_draft
from specahead.wire.messages import DraftEvent, Proposals, TargetEvent, Verdict
from specahead.wire.tasks import meanwhile
from target_service import service as target_service
from target_service.draft_in_target import JudgeRounds, LaunchRounds
from target_service.hooks import Hooks
from target_service.planning import VerifyStep
from target_service.verifier import Verifier

Arrived = Callable[[DraftEvent | TargetEvent], None]


def target_parts(settings: TargetSettings, flags: argparse.Namespace) -> target_service.Parts:
    """Return the parts of a target by the flags of service.py."""
    judging = Recorder(flags.timeline, _judged_rounds) if flags.timeline else None
    drafting = None
    if flags.timeline and settings.draft_in_target:
        drafting = Recorder(str(timeline_of_draft(Path(flags.timeline))), _drafted_rounds)
    return target_service.Parts(
        hooks=Hooks(
            judge=None if flags.acceptance is None else ImposedVerdicts(flags.acceptance, CONFIRMATION),
            on_draft_event=None if judging is None else partial(_note_arrival, judging, Proposals),
        ),
        drafter=_drafter_factory(drafting),
        steps=partial(_target_steps, flags.attached_while, judging, drafting),
    )


def draft_parts(flags: argparse.Namespace) -> draft_service.Parts:
    """Return the parts of a draft service by the flags of service.py."""
    recorder = Recorder(flags.timeline, _drafted_rounds) if flags.timeline else None
    return draft_service.Parts(
        drafter=_drafter_factory(recorder),
        steps=partial(_draft_steps, recorder),
        keep_link=partial(keep_link_while, Path(flags.attached_while).exists) if flags.attached_while else keep_link,
    )


# Steps


def _target_steps(
    attached_while: str | None,
    judging: Recorder | None,
    drafting: Recorder | None,
    verifier: Verifier,
    drafter: Drafter | None,
) -> Steps:
    steps = target_service.make_steps(verifier, drafter)
    if drafter is not None and attached_while:
        steps = StepsOfAttachable(steps, verifier, Path(attached_while))
    if judging is None:
        return steps
    judging.is_idle = lambda: not verifier.admission.running
    if drafting is None or drafter is None:
        return TimedSteps(steps, [judging], lambda step: judging)
    drafting.is_idle = lambda: not drafter.session_count
    return TimedSteps(steps, [judging, drafting], lambda step: judging if isinstance(step, VerifyStep) else drafting)


def _draft_steps(recorder: Recorder | None, drafter: Drafter) -> Steps:
    if recorder is None:
        return drafter
    recorder.is_idle = lambda: not drafter.session_count
    return TimedSteps(drafter, [recorder], lambda step: recorder)


class StepsOfAttachable:
    """Steps of a target whose own draft is attached while a file exists. It changes when no session runs."""

    def __init__(self, steps: Steps, verifier: Verifier, file: Path) -> None:
        self._steps, self._verifier, self._file = steps, verifier, file
        self._drafts = list(verifier.protocol.drafts)
        self.execute, self.finish_step = steps.execute, steps.finish_step
        self.fail_step, self.next_deadline = steps.fail_step, steps.next_deadline

    def plan_step(self) -> Any:
        if not self._verifier.admission.running:
            self._attach(self._file.exists())
        return self._steps.plan_step()

    def _attach(self, wanted: bool) -> None:
        protocol = self._verifier.protocol
        for draft in self._drafts:
            if wanted and draft not in protocol.drafts:
                protocol.attach(draft)
            elif not wanted and draft in protocol.drafts:
                protocol.detach(draft)


async def keep_link_while(is_attached: Callable[[], bool], *link: Any) -> None:
    """Keep a link while the draft is to be attached. Runs until cancelled."""
    while True:
        while not is_attached():
            await asyncio.sleep(0.05)
        async with meanwhile(keep_link(*link)):
            while is_attached():
                await asyncio.sleep(0.05)


# Rounds of a timeline


def _judged_rounds(step: VerifyStep) -> tuple[list[RoundKey], int]:
    ending = step.ending or VerifyStep()
    return [(item.session.id, *item.session.key) for item in ending.rounds], len(ending.prompt_tokens)


def _drafted_rounds(step: DraftStep | LaunchRounds | JudgeRounds) -> tuple[list[RoundKey], int]:
    """Return the rounds that end with a step, and how many prompts it reads.

    Launched rounds count in the step that waits for them. The target knows the epoch of rounds launched behind a step.
    """
    if isinstance(step, LaunchRounds):
        return [], 0
    if isinstance(step, JudgeRounds):
        if step.verify is not None:
            return [(item.session.id, *item.session.key) for item in step.verify.rounds], 0
        step = step.drafted
    rounds = [(item.session.id, item.session.at.epoch, item.number) for item in step.rounds]
    return rounds, len(step.reading)


def _note_arrival(recorder: Recorder, kind: type[Proposals] | type[Verdict], event: DraftEvent | TargetEvent) -> None:
    if isinstance(event, kind):
        recorder.arrived(event.at.session, event.at.epoch, event.at.round)


# The draft's model


def _drafter_factory(recorder: Recorder | None) -> Callable[..., Drafter]:
    arrived: Arrived = (lambda event: None) if recorder is None else partial(_note_arrival, recorder, Verdict)
    return partial(MeasuredDrafter, arrived=arrived)


class MeasuredDrafter(Drafter):
    """A drafter that foresees imposed tokens where it drafts before the verdict.

    arrived: called with each message of a target.
    """

    def __init__(self, *drafter: Any, arrived: Arrived = lambda event: None) -> None:
        super().__init__(*drafter)
        self._arrived = arrived

    def receive(self, peer: TargetPeer, event: TargetEvent) -> None:
        self._arrived(event)
        super().receive(peer, event)

    def execute(self, step: DraftStep) -> DraftStepResult:
        result = super().execute(step)
        return replace(result, rounds=self._foreseeing(step, result)) if self.overlaps else result

    def _foreseeing(self, step: DraftStep, result: DraftStepResult) -> list[RoundOutput]:
        """Return the rounds of a step with imposed tokens among the draft's choices."""
        starts = [
            item.session.skipped + start
            for item in step.rounds
            for start in [branch.length + 1 for branch in item.request.branches] or [item.base]
        ]
        drafted = [branch for output in result.rounds for branch in output.branches]
        imposed = iter(foreseeing(drafted, starts, self.runner.vocab_size))
        return [replace(output, branches=[next(imposed) for _ in output.branches]) for output in result.rounds]
