"""A draft that the target runs itself (`--placement together`): the steps of both models, by turns, on one device.

Both read memory as fast as it goes, so that side by side neither would gain. Draft and target are those of the two
services, with the same events between them, which are handed over as they are. Where nothing needs the host between
drafting and judging, the target's step is launched before the draft's rounds have ended
(target_service.device_chain), and the draft's next rounds before that step has: the host follows one step later.
"""

import time
from dataclasses import dataclass

from draft_service.drafter import Drafter
from draft_service.sessions import DraftSession, TargetPeer
from draft_service.steps import DraftStep, DraftStepResult, PlannedRound
from specahead.engine.steps.device_chain import Imposed
from specahead.engine.steps.outputs import RoundsUnderWay
from specahead.wire.errors import InvalidArgument
from specahead.wire.messages import Decline, DraftEvent, Load, Resync, TargetEvent
from target_service.device_chain import DraftedRound, take_proposals
from target_service.prompts import LEAST_PART
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from target_service.verify_step import VerifyResult, VerifyStep

TOGETHER = 2  # later turns whose prompts the draft reads at once
MOST_HELD = 0.5  # seconds from a turn's first token, after which it waits for no other turn


@dataclass(frozen=True)
class LaunchRounds:
    """A draft's step whose rounds are launched, and waited for later."""

    drafted: DraftStep
    before: VerifyStep | None = None
    """The step of the target, still running, that the rounds follow; None: the host has seen what they build on."""


@dataclass(frozen=True)
class Launched:
    """Rounds that run."""

    rounds: RoundsUnderWay
    began: float
    """When they were launched, by time.perf_counter."""


@dataclass(frozen=True)
class JudgeRounds:
    """A draft's step whose rounds run, and are waited for once the target's step that judges them is launched."""

    drafted: DraftStep
    launched: Launched
    verify: VerifyStep | None
    """None: no step can judge them before the host has seen them."""


Step = DraftStep | LaunchRounds | JudgeRounds | VerifyStep
Result = DraftStepResult | Launched | VerifyResult


class StepsByTurns:
    """Plans, executes and finishes the steps of a verifier and of the drafter that drafts for it alone."""

    def __init__(self, verifier: Verifier, drafter: Drafter) -> None:
        self.verifier, self.drafter = verifier, drafter
        self._drafts_next = True
        self._spoke = False  # one of them to the other, since a step was looked for
        self._launched: tuple[DraftStep, Launched] | None = None
        self._released: set[str] = set()  # later turns whose prompts the draft's next step may begin to read, by name
        self._turns_began = 0.0  # when the draft had last begun to read such prompts, by time.monotonic
        self._judged = 0.0  # when the last launched step of the target had ended, by time.perf_counter
        self._chains = verifier.runner.chains_rounds and drafter.runner.chains_rounds
        if self._chains:
            drafter.runner.join_chain(verifier.make_chain())
        if drafter.runner.reads_states:
            running = verifier.admission.running
            drafter.admission.kv_of_target = lambda name: running[name].kv if name in running else None
        self._target = TargetPeer(self._tell_target)
        self._draft = DraftPeer("draft in target", self._tell_draft, takes_turns=True)
        drafter.attach(self._target)
        verifier.protocol.attach(self._draft)

    def _tell_draft(self, event: TargetEvent) -> None:
        self._spoke = True
        self.drafter.receive(self._target, event)

    def _tell_target(self, event: DraftEvent) -> None:
        self._spoke = True
        try:
            self.verifier.protocol.receive(self._draft, event)
        except InvalidArgument as error:
            if isinstance(event, Load):
                raise
            name = event.session if isinstance(event, Decline | Resync) else event.at.session
            self.verifier.protocol.reject(self._draft, name, error)

    def plan_step(self) -> Step | None:
        """Return the next step, of the one that did not run last if it has something to do; None if neither has.

        While rounds run that were launched it is the one that judges them, once the step before them has ended.
        """
        running = self.verifier.under_way
        if self._launched is not None:
            return self._plan_judging(*self._launched) if running is None else self.verifier.plan_step()
        if running is not None and (drafted := self._plan_following_rounds(running)) is not None:
            self.verifier.counters["rounds_chained_to_steps"] += 1
            return LaunchRounds(drafted, running)
        while True:
            self._spoke = False
            order = (self.drafter, self.verifier) if self._drafts_next else (self.verifier, self.drafter)
            for owner in order:
                step = self.verifier.plan_step() if owner is self.verifier else self.drafter.plan_step(self._choose)
                if step is not None:
                    self._drafts_next = owner is self.verifier
                    return LaunchRounds(step) if isinstance(step, DraftStep) and self._can_launch(step) else step
            if not self._spoke:  # else the one may have something to do by what the other said
                step = self.drafter.plan_step(self._read_by_target)  # no turn is held while nothing runs
                if step is not None or not self._spoke:
                    return step

    def _can_launch(self, step: DraftStep) -> bool:
        """Return whether a target's step may judge the rounds of a draft's step while they run."""
        if not self._chains or not step.rounds or step.inputs or self.verifier.under_way is not None:
            return False
        return not any(item.overlaps or item.request.allowed or item.request.branches for item in step.rounds)

    def _plan_judging(self, step: DraftStep, launched: Launched) -> JudgeRounds:
        self._launched = None
        if not launched.rounds.of_one_branch:
            return JudgeRounds(step, launched, None)
        rounds = {item.session.id: self._drafted_round(item, row) for row, item in enumerate(step.rounds)}
        judged = {name: each for name, each in rounds.items() if each is not None}
        return JudgeRounds(step, launched, self.verifier.plan_chained_step(judged))

    def _drafted_round(self, item: PlannedRound, row: int) -> DraftedRound | None:
        """Return a round that runs as the target sees it; None if the target drops it.

        Of a round that follows a step the draft hears once it has ended where it stands: the target knows already. It
        drops one whose step has taken back tokens that the draft built on.
        """
        session, at, base = item.session, item.session.at, item.session.skipped + item.base
        if item.request.follows is not None:
            judged = self.verifier.admission.running.get(session.id)
            if judged is None or judged.draft.last_judged is None:
                return None
            key, verdict = judged.draft.last_judged
            if key != (at.epoch, at.round) or verdict.at.base != session.at.base:
                return None
            at, base = judged.at, len(judged.tokens)
        proposed = session.tokens_to_propose(base - session.skipped)
        return DraftedRound(at, proposed, row, item.request.announce is not None)

    def _plan_following_rounds(self, judging: VerifyStep) -> DraftStep | None:
        """Return what the draft drafts while a step of the target runs; None if that has to wait.

        It has to after a step that judges no drafted round, and where nothing was proposed that counts.
        """
        judged = [(row, item) for row, item in enumerate(judging.rounds) if item.input.draft_row is not None]
        if not judged or any(item.is_void for _, item in judged):
            return None
        places = {item.session.id: row for row, item in judged}
        running = {item.session.id for item in judging.rounds}
        return self.drafter.plan_chained_rounds(places, running, self._choose)

    def _read_by_target(self, waiting: list[DraftSession]) -> list[DraftSession]:
        """Return those of the draft's sessions whose prompts the target has read."""
        running = self.verifier.admission.running
        return [each for each in waiting if each.id in running and running[each.id].unread <= 0]

    def _choose(self, waiting: list[DraftSession]) -> list[DraftSession]:
        """Return which prompts the draft reads now: those that the target has read, and none while a short prompt waits
        for the target, since its first token would come later.

        It reads TOGETHER later turns at once, and the next ones after the time that the target took to read one. Turns
        that begin to generate together also end together. So their clients pause at the same time, and their next
        prompts come at the same time, of which each waits until those before it are read.
        """
        if self.verifier.reads_short_prompts:
            return []
        read, self._released = self._read_by_target(waiting), set()
        turns = [each.id for each in read if self._begins_turn(each)]
        if turns:
            spacing = self.verifier.admission.running[turns[0]].pace.prompt_seconds
            if time.monotonic() >= self._turns_began + spacing:
                self._released.update(turns[:TOGETHER])
        return [each for each in read if each.id in self._released or each.id not in turns]

    def _begins_turn(self, session: DraftSession) -> bool:
        """Return whether a session is a later turn that has its first token and no more, has a short rest of its prompt
        to be read by the draft, which has not begun with it, and has waited for that for less than MOST_HELD.
        """
        judged = self.verifier.admission.running.get(session.id)
        if judged is None or session.begun or judged.round != 1:
            return False
        is_later = 2 * judged.pace.prompt_tokens < judged.asked.prompt_tokens  # most of its prompt was in the KV
        is_short = len(session.pending) <= self.verifier.settings.prefill_chunk // LEAST_PART
        since = judged.stats.waiting_since
        return is_later and is_short and (since is None or time.monotonic() - since < MOST_HELD)

    def next_deadline(self) -> float | None:
        """Return the seconds until a session's patience with the draft ends; None if none is waiting."""
        return self.verifier.next_deadline()

    def execute(self, step: Step) -> Result:
        """Run a step, in the model's thread."""
        match step:
            case DraftStep():
                return self.drafter.execute(step)
            case VerifyStep():
                verified = self.verifier.execute(step)
                self._judged = time.perf_counter()
                return verified
            case LaunchRounds(drafted, before):
                began, imposed = time.perf_counter(), None if before is None else self._imposed(before)
                requests = [item.request for item in drafted.rounds]
                return Launched(self.drafter.runner.launch_rounds(requests, imposed), began)
            case JudgeRounds(_, launched, verify):
                if verify is not None:
                    self.verifier.execute(verify)
                outputs, ended = launched.rounds.outputs(), time.perf_counter()
                if verify is not None:
                    verify.began = ended
                return DraftStepResult(outputs, ended - max(launched.began, self._judged))

    def _imposed(self, step: VerifyStep) -> list[Imposed] | None:
        """Return what will be committed of a step whatever it gives, of the tokens of the last rounds alone."""
        imposed = self.verifier.imposed_verdicts(step)
        if imposed is None:
            return None
        each = zip(imposed, step.rounds, strict=True)
        return [(max(0, accepted - item.held), token, other) for (accepted, token, other), item in each]

    def finish_step(self, step: Step, result: Result) -> None:
        """Take what a step gave."""
        match step, result:
            case DraftStep(), DraftStepResult():
                if step.inputs:
                    self.verifier.pacing.note_draft_reading(self.drafter.reading.take())
                    if any(each.id in self._released for each in step.reading):
                        self._turns_began = time.monotonic()
                self.drafter.finish_step(step, result)
            case VerifyStep(), VerifyResult():
                # While rounds run, the step that judges them is launched first: the device waits for that, and sending
                # takes turns with the model's thread.
                self.verifier.finish_step(step, result, settles=self._launched is None)
            case LaunchRounds(drafted), Launched():
                self._launched = drafted, result
            case JudgeRounds(drafted, _, verify), DraftStepResult():
                self.drafter.finish_step(drafted, result)
                if verify is not None:
                    take_proposals(verify)
                    self.verifier.finish_step(verify, VerifyResult([], [], 0.0))
                self.verifier.settle()
            case _:
                raise TypeError(f"a {type(step).__name__} gave a {type(result).__name__}")

    def fail_step(self, step: Step, error: Exception) -> bool:
        """Take the sessions of a step that raised `error` out of service; those of a draft's are decoded plainly."""
        if isinstance(step, VerifyStep):
            return self.verifier.fail_step(step, error)
        self.verifier.settle()
        drafted = step if isinstance(step, DraftStep) else step.drafted
        if isinstance(step, JudgeRounds) and step.verify is not None:
            self.verifier.fail_step(step.verify, error)
        return self.drafter.fail_step(drafted, error)
