"""A service as in any deployment, with what a benchmark needs.

Its flags are the service's own and those below. Its steps can be timed, a draft can change how it drafts from row to
row without starting anew, and sessions can read what a recorded trace says in place of what random weights select.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import uvloop

import draft_service.service
import specahead.sparsity.reader
import target_service.service
from draft_service.drafter import Drafter
from draft_service.link import keep_link
from draft_service.sessions import DraftSession
from draft_service.steps import DraftStep, DraftStepResult
from specahead.config import DraftSettings, SettingsError, TargetSettings, resolve_service
from specahead.engine.kv.pages import pages_for
from specahead.engine.loading.config import load_shape
from specahead.engine.loading.opening import OpenedModel
from specahead.engine.loading.tokenizer import load_tokenizer, tokenizer_hash
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.steps.inputs import SharedBudget
from specahead.engine.steps.rounds.requests import DraftedTokens, RoundOutput
from specahead.engine.steps.step_loop import run_step_loop
from specahead.lab.benchmarks.scripted import ScriptedRunner
from specahead.lab.benchmarks.serving.controls import Controls
from specahead.lab.benchmarks.serving.timeline import Recorder, RecorderOfBoth, RoundKey, timeline_of_draft
from specahead.sparsity.budgets import shared_budget
from specahead.sparsity.selection import last_word_mask, row_words
from specahead.wire.messages import Proposals, Verdict
from specahead.wire.server import serve_until_signal
from specahead.wire.session_names import name_of_client
from target_service.commit import imposed_token
from target_service.draft_in_target import BehindStep, LaunchStep, Step, StepsByTurns
from target_service.planning import VerifyStep
from target_service.protocol import DraftProtocol
from target_service.self_drafting import SelfDrafting
from target_service.verifier import Verifier


class ControlledDrafter(Drafter):
    """A drafter that reads its controls whenever it has no session."""

    controls_file = ""
    _controls: Controls | None = None
    _replayed: np.ndarray | None = None  # uint64 [sessions, rounds, rows, words]

    def plan_step(self) -> DraftStep | None:
        if self.controls_file and not self.session_count:
            self._take(Controls.read(self.controls_file))
        return super().plan_step()

    def _take(self, controls: Controls) -> None:
        if controls == self._controls:
            return
        self._controls = controls
        chosen = replace(self._settings.speculation, branches=controls.branches)
        self._settings = replace(self._settings, speculation=chosen)
        self._replayed = np.load(controls.replay, mmap_mode="r") if controls.replay else None

    def execute(self, step: DraftStep) -> DraftStepResult:
        result = super().execute(step)
        if self._controls is not None and self._controls.foresight > 0 and self._settings.speculation.overlap:
            result = replace(result, rounds=self._foreseeing(step, result, self._controls.foresight))
        if self._replayed is None:
            return result
        rounds = []
        for (session, number, base), output in zip(_drafted(step), result.rounds, strict=True):
            if output.bitmap is not None:
                index = int(name_of_client(session.id).rpartition("/")[2]) % len(self._replayed)
                words = replayed_words(self._replayed[index], number, self._plan.num_blocks(base))
                output = replace(output, bitmap=words, coded=None)
            rounds.append(output)
        return replace(result, rounds=rounds)

    def _foreseeing(self, step: DraftStep, result: DraftStepResult, foresight: float) -> list[RoundOutput]:
        """Return the rounds of a step with imposed tokens among the draft's choices."""
        starts = [
            start
            for planned in step.rounds
            for start in [branch.length + 1 for branch in planned.request.branches] or [planned.base]
        ]
        drafted = [branch for output in result.rounds for branch in output.branches]
        imposed = iter(foreseeing(drafted, starts, foresight, self.runner.vocab_size))
        return [replace(output, branches=[next(imposed) for _ in output.branches]) for output in result.rounds]


class ControlledSteps(StepsByTurns):
    """Steps of a target whose own draft comes and goes as its controls say, between sessions."""

    controls_file = ""

    def plan_step(self) -> Step | None:
        if self.controls_file and not self.verifier.admission.running:
            self._attach(Controls.read(self.controls_file).attached)
        return super().plan_step()

    def _attach(self, wanted: bool) -> None:
        protocol = self.verifier.protocol
        if wanted and self._draft not in protocol.drafts:
            protocol.attach(self._draft)
        elif not wanted and self._draft in protocol.drafts:
            protocol.detach(self._draft)


def foreseeing(
    drafted: list[DraftedTokens], starts: list[int], foresight: float, vocab: int
) -> Iterable[DraftedTokens]:
    """Yield what was drafted from each of the positions on, with the imposed token of some as the draft's next choice.

    Which positions these are follows from the position alone. drafted: of as many tokens each; all of a step in one
    array, since the draft waits for this.
    """
    tokens = np.array([each.tokens for each in drafted])
    positions = np.array(starts)[:, None] + np.arange(tokens.shape[1])
    known = positions * 2654435761 % 2**32 < foresight * 2**32
    imposed = imposed_token(positions, vocab)
    tokens[:, -1] = np.where(known[:, -1], imposed[:, -1], tokens[:, -1])
    if any(each.alternatives is None for each in drafted):
        yield from (replace(each, tokens=own) for each, own in zip(drafted, tokens.tolist(), strict=True))
        return
    alternatives = np.stack([each.alternatives for each in drafted if each.alternatives is not None])
    alternatives[:, :, 0] = tokens
    alternatives[known, 1] = imposed[known]
    for each, own, others in zip(drafted, tokens.tolist(), alternatives, strict=True):
        yield DraftedTokens(own, each.ids, each.probs, others)


def _drafted(step: DraftStep) -> list[tuple[DraftSession, int, int]]:
    """Return of each round that a step drafts its session, its number, and the position at which it begins."""
    return [(item.session, item.session.round + item.ahead, item.base) for item in step.rounds]


def replayed_words(rounds: np.ndarray, number: int, blocks: int) -> np.ndarray:
    """Return what a round reads, uint64 [rows, words] over `blocks` blocks. rounds: uint64 [rounds, rows, words].

    A session that takes more rounds than were laid out, as one decoded plainly does, begins with the first again.
    """
    words = np.array(rounds[number % len(rounds), :, : row_words(blocks)])
    if words.shape[1] == row_words(blocks):
        words[:, -1] &= last_word_mask(blocks)
    return words


def announced_only(*of_round: Any) -> SharedBudget:
    """What a reader shares out where the draft announces all that is to be read, if it announces."""
    budget, announced = shared_budget(*of_round), of_round[-1]
    return budget if announced is None else replace(budget, room=0)


def run() -> None:
    """Run `python -m specahead.lab.benchmarks.serving target|draft`."""
    side = sys.argv[1] if len(sys.argv) > 1 else ""
    parser = argparse.ArgumentParser(prog=f"python -m specahead.lab.benchmarks.serving {side}", description=__doc__)
    parser.add_argument("--timeline", metavar="FILE", help="write when steps ran and messages came")
    parser.add_argument("--controls", metavar="FILE", help="JSON, read again before each row")
    parser.add_argument("--replay", action="store_true", help="of a target: read what is announced and nothing else")
    parser.add_argument(
        "--slept", type=float, default=0.0, metavar="MS", help="of a target: a step's time, without a model"
    )
    try:
        if side == "target":
            _run_target(parser)
        elif side == "draft":
            _run_draft(parser)
        else:
            sys.exit(f"error: the first argument is target or draft, got {side!r}")
    except SettingsError as error:
        sys.exit(f"error: {error}")


def _as_controlled(controls: str) -> Callable[..., int]:
    """Return what stands in for SelfDrafting.drafted_in_step: a fixed number of tokens is drafted in the rows that are
    to draft, whether it pays or not.
    """
    decided = SelfDrafting.drafted_in_step

    def drafted_in_step(drafting: SelfDrafting, tokens: int, away: int = 0) -> int:
        if not Controls.read(controls).self_drafting:
            return 0
        return decided(drafting, tokens, away) if drafting.adaptive else drafting.gamma

    return drafted_in_step


def _run_target(parser: argparse.ArgumentParser) -> None:
    settings, flags = resolve_service(parser, TargetSettings(port=50052), sys.argv[2:], os.environ)
    with contextlib.ExitStack() as patches:
        if settings.draft == "self":
            patches.enter_context(patch.object(SelfDrafting, "drafted_in_step", _as_controlled(flags.controls)))
        if flags.slept:
            opened = _without_model(settings, flags.slept)
            patches.enter_context(patch.object(target_service.service, "open_model", lambda *_: opened))
        if flags.replay:
            patches.enter_context(patch.object(specahead.sparsity.reader, "shared_budget", announced_only))
        if settings.draft_in_target:
            ControlledDrafter.controls_file = ControlledSteps.controls_file = flags.controls or ""
            patches.enter_context(patch.object(target_service.service, "Drafter", ControlledDrafter))
            patches.enter_context(patch.object(target_service.service, "StepsByTurns", ControlledSteps))
            if flags.timeline:
                _time_both(patches, flags.timeline)
        elif flags.timeline:
            _time_service(
                patches, target_service.service, DraftProtocol, Proposals, partial(_target_recorder, flags.timeline)
            )
        uvloop.run(serve_until_signal("target", lambda on_ready: target_service.service.run(settings, on_ready)))


def _without_model(settings: TargetSettings, milliseconds: float) -> OpenedModel:
    """Return what stands in for a target's model where its verdicts are imposed: each of its steps sleeps."""
    shape, tokenizer = load_shape(settings.model), load_tokenizer(settings.model)
    pages = settings.max_sessions * pages_for(settings.max_context + 8 * settings.widest_round)
    runner = ScriptedRunner(errs=False, pages=pages, step_ms=(milliseconds, 0.0))
    runner.vocab_size = shape.vocab_size
    return OpenedModel(runner, shape, tokenizer_hash(tokenizer), Grammars(tokenizer, runner.vocab_size, []))


def _run_draft(parser: argparse.ArgumentParser) -> None:
    settings, flags = resolve_service(parser, DraftSettings(port=50053), sys.argv[2:], os.environ)
    ControlledDrafter.controls_file = flags.controls or ""
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(draft_service.service, "Drafter", ControlledDrafter))
        if flags.controls:
            patches.enter_context(patch.object(draft_service.service, "keep_link", partial(_keep_link, flags.controls)))
        if flags.timeline:
            _time_service(patches, draft_service.service, Drafter, Verdict, partial(_draft_recorder, flags.timeline))
        uvloop.run(serve_until_signal("draft", lambda on_ready: draft_service.service.run(settings, on_ready)))


async def _keep_link(controls_file: str, *link: Any) -> None:
    """Keep a link once the controls allow it."""
    while not Controls.read(controls_file).attached:
        await asyncio.sleep(0.05)
    await keep_link(*link)


def _target_recorder(file: str, verifier: Verifier) -> Recorder:
    return Recorder(file, _rounds_verified, lambda: not verifier.admission.running)


def _draft_recorder(file: str, drafter: Drafter) -> Recorder:
    return Recorder(file, _rounds_drafted, lambda: not drafter.session_count)


def _rounds_verified(step: VerifyStep) -> tuple[list[RoundKey], int]:
    ending = step.ending or VerifyStep()
    return [(item.session.id, *item.session.key) for item in ending.rounds], len(ending.prefills)


def _rounds_drafted(work: DraftStep | LaunchStep | BehindStep) -> tuple[list[RoundKey], int]:
    """Rounds that are launched count where they are waited for.

    Of those that were launched behind a step the target knows the epoch by then.
    """
    if isinstance(work, LaunchStep):
        return [], 0
    if isinstance(work, BehindStep) and work.verify is not None:
        return [(item.session.id, *item.session.key) for item in work.verify.rounds], 0
    step = work if isinstance(work, DraftStep) else work.drafted
    return [(session.id, session.epoch, number) for session, number, _ in _drafted(step)], len(step.reading)


def _time_service(
    patches: contextlib.ExitStack,
    service: ModuleType,
    receiver: type,
    message: type[Proposals] | type[Verdict],
    recorder_of: Callable[[Any], Recorder],
) -> None:
    """Have a service's steps timed, and the arrival of messages of a kind. receiver: the class that takes them.

    recorder_of: makes the recorder, given the owner of the step loop's functions.
    """
    recorders: list[Recorder] = []

    def recorder(steps: Any) -> Recorder:
        recorders.append(recorder_of(steps))
        return recorders[0]

    _time_arrivals(patches, receiver, message, recorders)
    _time_steps(patches, service, recorder)


def _time_both(patches: contextlib.ExitStack, file: str) -> None:
    """Have the steps of a target and of the draft in it timed, each kind in a file of its own."""
    verified: list[Recorder] = []
    drafted: list[Recorder] = []

    def recorder(steps: StepsByTurns) -> RecorderOfBoth:
        verified.append(_target_recorder(file, steps.verifier))
        drafted.append(_draft_recorder(str(timeline_of_draft(Path(file))), steps.drafter))
        return RecorderOfBoth(
            [*verified, *drafted], lambda work: verified[0] if isinstance(work, VerifyStep) else drafted[0]
        )

    _time_arrivals(patches, DraftProtocol, Proposals, verified)
    _time_arrivals(patches, Drafter, Verdict, drafted)
    _time_steps(patches, target_service.service, recorder)


def _time_arrivals(
    patches: contextlib.ExitStack, receiver: type, message: type[Proposals] | type[Verdict], recorders: list[Recorder]
) -> None:
    """Have the arrival of messages of a kind told to the recorder that there will be by then."""
    receive = vars(receiver)["receive"]

    def timed_receive(owner: Any, peer: Any, event: Any) -> None:
        if isinstance(event, message):
            recorders[0].arrived(event.at.session, event.at.epoch, event.at.round)
        receive(owner, peer, event)

    patches.enter_context(patch.object(receiver, "receive", timed_receive))


def _time_steps(
    patches: contextlib.ExitStack, service: ModuleType, recorder_of: Callable[[Any], Recorder | RecorderOfBoth]
) -> None:
    """Have a service's steps timed by the recorder that is made of the owner of the step loop's functions."""

    async def timed_loop(plan_step: Any, execute: Any, finish_step: Any, *rest: Any, **how: Any) -> None:
        recorder = recorder_of(plan_step.__self__)
        await run_step_loop(
            lambda: recorder.plan(plan_step),
            lambda work: recorder.execute(execute, work),
            lambda work, result: recorder.finish(finish_step, work, result),
            *rest,
            **how,
        )

    patches.enter_context(patch.object(service, "run_step_loop", timed_loop))
