"""Drafts for all sessions of all targets, in whole rounds. Knows nothing of gRPC: events in, events out."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from draft_service.admission import Admission
from draft_service.outcomes import ALTERNATIVES, BESIDE
from draft_service.proposals import send_round, take_round
from draft_service.sessions import DraftedRound, DraftSession, TargetPeer
from draft_service.steps import (
    Choose,
    DraftStep,
    DraftStepResult,
    Work,
    find_work,
    plan_chained_rounds,
    plan_draft_step,
    tell_ready,
)
from specahead.config import DraftSettings
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.steps.device_clock import DeviceClock
from specahead.engine.steps.requests import gammas
from specahead.engine.steps.runner import DraftRunner
from specahead.engine.steps.step_loop import describe, prefill_chunk
from specahead.sparsity.plan import Plan
from specahead.sparsity.rounds import round_settings
from specahead.wire.messages import Begin, End, Load, Refusal, Resync, TargetEvent, Verdict

log = logging.getLogger(__name__)

# Counters that exist before they count: Prometheus sees no rise in one that begins with 1.
_COUNTED = ("failed_steps", "resyncs", "declined_sessions")
_FORESIGHT = 0.5  # share of verdicts foreseen from which overlap pays


class Drafter:
    """What the draft service drives: targets attach and send events; the step loop plans, executes and finishes steps.

    Events may come at any time and are applied between steps. `execute` alone runs in another thread.
    """

    def __init__(
        self, runner: DraftRunner, plan: Plan, settings: DraftSettings, grammars: Grammars | None = None
    ) -> None:
        """grammars: compiles the grammars of sessions; None declines sessions with one."""
        device = str(runner.kv.device) if settings.device == "auto" else settings.device
        chosen, chunk = settings.chosen, prefill_chunk(settings.prefill_chunk, runner.kv.device)
        settings = replace(settings, prefill_chunk=chunk, device=device)
        self.runner, self.plan = runner, plan
        self.overlaps = chosen.branches > 0
        """Whether rounds are drafted before the verdict on the round before."""
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._settings = settings
        self.admission = Admission(runner.kv, settings, self.counters, grammars)
        self._peers: list[TargetPeer] = []
        self._parts_read = 0  # steps that read prompts
        self._inbox: list[tuple[TargetPeer, TargetEvent | None]] = []
        self.reading = DeviceClock(runner.kv.device)
        """Times the reading of prompts, by tokens."""
        rounds = round_settings(plan, settings.most_drafted, settings.support, chosen.draft_read_share)
        alternatives = ALTERNATIVES if chosen.branches > 1 else 0 if self.overlaps else BESIDE
        rounds = replace(rounds, branches=max(1, chosen.branches), runs_last=self.overlaps)
        if runner.reads_states:  # it reads little KV: one layer's
            rounds = replace(rounds, reads_states=True, read_share=1.0)
        runner.prepare_rounds(replace(rounds, alternatives=min(alternatives, runner.vocab_size)))

    def warm_up(self) -> None:
        """Capture the steps for prompts, and for rounds that announce nothing or by the plan."""
        self.runner.warm_up_prompts(self._settings.prefill_chunk)
        *fewer, _ = gammas(self._settings.most_drafted) if self._settings.adaptive else [0]
        self.runner.warm_up_rounds(self._settings.max_sessions, not self.runner.reads_states, fewer)

    @property
    def is_idle(self) -> bool:
        """Whether there is no session."""
        return not self.session_count and not self._inbox

    @property
    def session_count(self) -> int:
        """How many sessions are drafted for."""
        return len(self.admission.sessions)

    # Events from targets.

    def attach(self, peer: TargetPeer) -> None:
        """Take up a target whose stream stands."""
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

    def _tell_load(self) -> None:
        """Tell each target how many sessions the others have here, where that has changed."""
        for peer in self._peers:
            others = self.session_count - len(peer.sessions)
            if peer.reported_others != others:
                peer.reported_others = others
                peer.send(Load(others))

    def _receive_verdict(self, peer: TargetPeer, verdict: Verdict) -> None:
        """Apply a verdict, unless it is a repeat; ask for a new Begin (Resync) if it does not follow the one before."""
        name = verdict.at.session
        session = peer.sessions.get(name)
        if session is None:
            if not self.admission.expects_verdicts(peer, name):
                peer.send(Resync(name))
            return
        if verdict.at.round <= session.at.round:
            self.counters["repeated_verdicts"] += 1
            return
        try:
            self._apply_verdict(session, verdict)
        except ValueError:
            self.counters["resyncs"] += 1
            peer.send(Resync(name))

    def _apply_verdict(self, session: DraftSession, verdict: Verdict) -> None:
        epoch, overlapped = session.at.epoch, session.overlap is not None
        met = session.apply(verdict, self.runner.kv)
        if overlapped:
            self.counters["overlapped_verdicts"] += 1
            self.counters["met_verdicts"] += met
        if met and session.at.epoch != epoch and session.present is not None:
            send_round(session, session.present, self.counters)
        # A round chained to a step that accepts nothing writes the KV of the last committed token once more.
        self.runner.kv.index_prefix(session.kv, session.tokens, max(0, session.tokens_in_place - 1))

    # Steps.

    def plan_step(self, choose: Choose = lambda sessions: sessions) -> DraftStep | None:
        """Apply the events that have come and return the next step, None if there is nothing to do.

        choose: which prompts may be read now. The pages that the step writes are reserved; when they run out, sessions
        give way.
        """
        self._apply_inbox()
        self._tell_load()
        while (work := self._find_work(choose)) is not None:
            step = plan_draft_step(work, self.plan, self._settings, self.runner.kv, self._parts_read)
            if self.runner.kv.reserve(step.work):
                self._parts_read += bool(step.inputs)
                return step
            self.admission.preempt_youngest()
        return None

    def plan_chained_rounds(
        self, places: Mapping[str, int], running: Collection[str], choose: Choose
    ) -> DraftStep | None:
        """Apply the events that have come, and return the rounds to launch after a step of the target that judges the
        present ones; None if a prompt is to be read, or there is no room.

        places: where in that step each session's present round is judged, by name. running: the names of all sessions
        in the step. Those whose rounds are not judged there are drafted for after it: the target has them wait from now
        on. choose: as of plan_step.
        """
        self._apply_inbox()
        self._tell_load()
        work = self._find_work(choose) or Work([], [])
        # What a head reads, the target may still be writing.
        if self.overlaps or work.reading or (work.due and self.runner.reads_states):
            return None
        tell_ready(work.due)
        due = [session for session in work.due if session.id not in running]
        drafting = [session for session in self.admission.sessions if not session.is_reading]
        step = plan_chained_rounds(drafting, due, places, self.plan)
        return step if step is not None and self.runner.kv.reserve(step.work) else None

    def _find_work(self, choose: Choose) -> Work | None:
        sessions = self.admission.sessions
        foresight = 0.0 if len(sessions) == 1 else _FORESIGHT  # a draft's only session holds up no other
        return find_work(sessions, foresight, self.overlaps, choose)

    def next_deadline(self) -> float | None:
        """Return None: new work comes with events only."""
        return None

    def execute(self, step: DraftStep) -> DraftStepResult:
        """Run the model, in the model's thread; touches no session but through its KV."""
        started = time.perf_counter()
        rounds = self.runner.draft_rounds([item.request for item in step.rounds]) if step.rounds else []
        if step.inputs:
            with self.reading.timing(sum(len(item.tokens) for item in step.inputs)):
                self.runner.forward(step.inputs)
        return DraftStepResult(rounds, time.perf_counter() - started)

    def finish_step(self, step: DraftStep, result: DraftStepResult) -> None:
        """Keep the rounds of a step and propose them, all in one frame: a target does not begin with a part of it."""
        drafted: list[tuple[DraftSession, DraftedRound]] = []
        for planned, output in zip(step.rounds, result.rounds, strict=True):
            session, grammar = planned.session, planned.session.terms.grammar
            if grammar is not None and grammar.error:
                self.admission.fail(session, grammar.error)
            elif all(branch.probs is None or np.isfinite(branch.probs).all() for branch in output.branches):
                drafted.append((session, take_round(planned, output, self.plan, result.seconds)))
            else:
                self.admission.fail(session, "the draft's logits are NaN or infinite")
        self._apply_inbox()
        # A verdict that came meanwhile has dropped a round, or has proposed the outcome that it met.
        for session, round_ in drafted:
            is_here = session.peer.sessions.get(session.id) is session
            if is_here and (round_ is session.present or round_ is session.overlap):
                send_round(session, round_, self.counters)
        for session in step.reading:
            session.begun = True
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
