"""Drafts for all sessions of all targets, in whole rounds. Knows nothing of gRPC: events in, events out."""

import logging
import time
from collections import Counter

import numpy as np

from config import DraftSettings
from draft_service.admission import Admission
from draft_service.sessions import DraftSession, TargetPeer
from draft_service.steps import DraftStep, DraftStepResult, plan_draft_step, take_round
from draft_service.verdicts import receive_verdict
from engine.runner import Runner
from engine.step_loop import describe
from sparsity.plan import Plan
from sparsity.rounds import round_settings
from wire.messages import Begin, End, Refusal, Resync, TargetEvent, Verdict

log = logging.getLogger(__name__)

_FORESIGHT = 0.5  # share of verdicts foreseen from which drafting ahead pays


class Drafter:
    """What the draft service drives: targets attach and send events, and the step loop plans, executes and finishes.

    Events may come at any time and are applied between steps. `execute` alone runs in another thread.
    """

    def __init__(self, runner: Runner, plan: Plan, settings: DraftSettings) -> None:
        self.runner = runner
        self.counters: Counter[str] = Counter()
        self._plan, self._settings = plan, settings
        self.admission = Admission(runner.kv, settings, self.counters)
        self._peers: list[TargetPeer] = []
        self._inbox: list[tuple[TargetPeer, TargetEvent | None]] = []
        self._steps = 0
        runner.prepare_rounds(round_settings(plan, settings.gamma, settings.support, settings.read_share))

    @property
    def session_count(self) -> int:
        """How many sessions are drafted for."""
        return sum(len(peer.sessions) for peer in self._peers)

    # Events from targets.

    def attach(self, peer: TargetPeer) -> None:
        """Take a target whose stream stands."""
        self._peers.append(peer)

    def detach(self, peer: TargetPeer) -> None:
        """Forget a target whose stream broke, with all its sessions."""
        self._inbox.append((peer, None))

    def receive(self, peer: TargetPeer, event: TargetEvent) -> None:
        """Take an event, which is applied before the next step."""
        self._inbox.append((peer, event))

    def _apply_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for peer, event in inbox:
            match event:
                case None:
                    self.admission.detach(peer)
                    self._peers.remove(peer)
                case Begin():
                    self.admission.begin(peer, event)
                case Verdict():
                    self._receive_verdict(peer, event)
                case End(name):
                    self.admission.end(peer, name)
                case Refusal(expected, _):
                    self.counters["refused_frames"] += 1
                    peer.send(Resync(expected.session))

    def _receive_verdict(self, peer: TargetPeer, verdict: Verdict) -> None:
        name = verdict.at.session
        if name in peer.sessions:
            receive_verdict(peer.sessions[name], verdict, self.runner.kv, self.counters)
        elif not self.admission.expects_verdicts(peer, name):
            peer.send(Resync(name))

    # Steps.

    def plan_step(self) -> DraftStep | None:
        """Apply the events that have come and return the next step, None if there is nothing to do."""
        self._apply_inbox()
        sessions = [session for peer in self._peers for session in peer.sessions.values()]
        for session in sessions:
            if self._may_go_ahead(session):
                session.go_ahead()
        step = plan_draft_step(sessions, self._plan, self._settings, self._steps + 1)
        self._steps += step is not None
        return step

    def _may_go_ahead(self, session: DraftSession) -> bool:
        """Return whether a session may be drafted ahead of its verdict. A draft's only session always may."""
        return self._settings.ahead and session.foresees(0.0 if self.session_count == 1 else _FORESIGHT)

    def execute(self, step: DraftStep) -> DraftStepResult:
        """Run the model. Runs in the model thread; touches no session but through its KV."""
        started = time.perf_counter()
        rounds = self.runner.draft_rounds(step.requests) if step.requests else []
        if step.inputs:
            self.runner.forward(step.inputs)
        return DraftStepResult(rounds, time.perf_counter() - started)

    def finish_step(self, step: DraftStep, result: DraftStepResult) -> None:
        """Take what a step gave and send it."""
        for session, output in zip(step.drafting, result.rounds, strict=True):
            if output.probs is not None and not np.isfinite(output.probs).all():
                self.admission.fail(session, "the draft's logits are NaN or infinite")
            else:
                take_round(session, output, self._plan, result.seconds, self.counters)
        for session in step.reading:
            self.runner.kv.index_prefix(session.kv, session.tokens, session.committed)

    def fail_step(self, step: DraftStep, error: Exception) -> bool:
        """Decline the sessions of a step that raised `error`, so that their targets decode them plainly."""
        self.counters["failed_steps"] += 1
        reason = f"a model step of the draft failed: {describe(error)}"
        names = ", ".join(session.id for session in step.sessions)
        log.error("%s; declined: %s", reason, names)
        log.debug("the step that failed", exc_info=error)
        for session in step.sessions:
            self.admission.fail(session, reason)
        return True
