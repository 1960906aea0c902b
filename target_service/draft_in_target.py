"""A draft that the target runs itself (`--draft-in-target`): the steps of both models, by turns, on one device.

Both read memory as fast as it goes, so that side by side neither would gain. Draft and target are those of the two
services, with the same events between them, which are handed over as they are.
"""

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from draft_service.steps import DraftStep, DraftStepResult
from target_service.planning import VerifyResult, VerifyStep
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from wire.errors import InvalidArgument
from wire.messages import Decline, DraftEvent, Load, Resync, TargetEvent

Step = DraftStep | VerifyStep
Result = DraftStepResult | VerifyResult


class StepsByTurns:
    """Plans, executes and finishes the steps of a verifier and of the drafter that drafts for it alone."""

    def __init__(self, verifier: Verifier, drafter: Drafter) -> None:
        self.verifier, self.drafter = verifier, drafter
        self._drafts_next = True
        self._spoke = False  # one of them to the other, since a step was looked for
        self._target = TargetPeer(self._tell_target)
        self._draft = DraftPeer("draft in target", self._tell_draft)
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
        """Return the next step, of the one that did not run last if it has something to do; None if neither has."""
        while True:
            self._spoke = False
            order = (self.drafter, self.verifier) if self._drafts_next else (self.verifier, self.drafter)
            for owner in order:
                step = owner.plan_step()
                if step is not None:
                    self._drafts_next = owner is self.verifier
                    return step
            if not self._spoke:  # else the one may have something to do by what the other said
                return None

    def next_deadline(self) -> float | None:
        """Return the seconds until a session's patience with the draft ends; None if none is waiting."""
        return self.verifier.next_deadline()

    def execute(self, step: Step) -> Result:
        """Run a step, in the model's thread."""
        return self.drafter.execute(step) if isinstance(step, DraftStep) else self.verifier.execute(step)

    def finish_step(self, step: Step, result: Result) -> None:
        """Take what a step gave."""
        if isinstance(step, DraftStep):
            assert isinstance(result, DraftStepResult)
            self.drafter.finish_step(step, result)
        else:
            assert isinstance(result, VerifyResult)
            self.verifier.finish_step(step, result)

    def fail_step(self, step: Step, error: Exception) -> bool:
        """Take the sessions of a step that raised `error` out of service; those of a draft's are decoded plainly."""
        if isinstance(step, DraftStep):
            return self.drafter.fail_step(step, error)
        return self.verifier.fail_step(step, error)
