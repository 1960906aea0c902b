"""Drafts for all sessions of all targets, in whole rounds. Knows nothing of gRPC: events in, events out."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from draft_service.admission import Admission
from draft_service.outcomes import ALTERNATIVES, BESIDE
from draft_service.sessions import DraftSession, RoundAhead, TargetPeer
from draft_service.steps import (
    DraftStep,
    DraftStepResult,
    Work,
    find_work,
    plan_behind_step,
    plan_draft_step,
    put_off_until,
    send_ahead,
    send_round,
    take_round,
)
from draft_service.verdicts import receive_verdict
from specahead.config import DraftSettings
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.steps.rounds.requests import DraftedTokens, gammas
from specahead.engine.steps.runner import Runner
from specahead.engine.steps.step_loop import describe, prefill_chunk
from specahead.sparsity.methods import METHODS
from specahead.sparsity.plan import Plan
from specahead.sparsity.rounds import round_settings
from specahead.wire.messages import Begin, End, Load, Refusal, Resync, TargetEvent, Verdict
from specahead.wire.tracing import NO_SPANS, Spans

log = logging.getLogger(__name__)

# Counters that are there before they count: Prometheus sees no rise in one that begins with 1.
_COUNTED = ("failed_steps", "resyncs", "declined_sessions")
_FORESIGHT = 0.5  # share of verdicts foreseen from which drafting ahead pays


class Drafter:
    """What the draft service drives: targets attach and send events, and the step loop plans, executes and finishes.

    Events may come at any time and are applied between steps. `execute` alone runs in another thread.
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        settings: DraftSettings,
        grammars: Grammars | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        settings = replace(
            settings,
            prefill_chunk=prefill_chunk(settings.prefill_chunk, runner.kv.device),
            device=str(runner.kv.device) if settings.device == "auto" else settings.device,
        )
        self.runner = runner
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._plan, self._settings, self._spans = plan, settings, spans
        self.admission = Admission(runner.kv, settings, self.counters, grammars)
        self._peers: list[TargetPeer] = []
        self._inbox: list[tuple[TargetPeer, TargetEvent | None]] = []
        self._put_off = 0.0
        self.round_seconds = 0.0  # of the last step that drafted rounds and read nothing
        chosen = settings.chosen
        rounds = round_settings(plan, settings.most_drafted, settings.support, chosen.draft_read_share)
        alternatives = ALTERNATIVES if chosen.branches > 1 else 0 if chosen.overlap else BESIDE
        memories = settings.max_sessions + 1  # a session may end in the step that runs
        rounds = replace(rounds, memories=memories, branches=chosen.branches, runs_last=chosen.overlap)
        runner.prepare_rounds(replace(rounds, alternatives=min(alternatives, runner.vocab_size)))

    def warm_up(self) -> None:
        """Make the runner ready for prompts, and for the rounds of sessions that announce nothing or by the plan."""
        announcing = METHODS[self._plan.method].announcing is not None
        self.runner.warm_up_prompts(self._settings.prefill_chunk)
        *fewer, _ = gammas(self._settings.most_drafted) if self._settings.adaptive else [0]
        methods = [self._plan.method] if announcing else []
        self.runner.warm_up_rounds(self._settings.max_sessions, methods, fewer)

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
        """Take a target whose stream stands."""
        self._peers.append(peer)

    def detach(self, peer: TargetPeer) -> None:
        """Forget a target whose stream broke, with all its sessions."""
        self._inbox.append((peer, None))

    def receive(self, peer: TargetPeer, event: TargetEvent) -> None:
        """Take an event, which is applied before the next step."""
        if isinstance(event, Verdict):
            peer.verdicts.note(time.perf_counter())
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
            if peer.told != others:
                peer.told = others
                peer.send(Load(others))

    def _receive_verdict(self, peer: TargetPeer, verdict: Verdict) -> None:
        name = verdict.at.session
        if name in peer.sessions:
            receive_verdict(peer.sessions[name], verdict, self.runner.kv, self.counters)
        elif not self.admission.expects_verdicts(peer, name):
            peer.send(Resync(name))

    # Steps.

    def plan_step(self) -> DraftStep | None:
        """Apply the events that have come and return the next step, None if there is nothing to do.

        The pages that it writes are taken; where they run out, sessions give way, the youngest first.
        """
        self._apply_inbox()
        self._tell_load()
        self._put_off = 0.0
        while (work := self._find_work()) is not None:
            self._put_off = put_off_until(work, self.round_seconds)
            if self._put_off:
                return None
            step = plan_draft_step(work, self._plan, self._settings, self.runner.kv)
            if self.runner.kv.reserve(step.work):
                return step
            self.admission.preempt_youngest()
        return None

    def plan_behind_step(self, places: Mapping[str, int]) -> DraftStep | None:
        """Apply the events that have come, and return the rounds to launch behind a step of the target that judges the
        present ones; None if there is something else to do, or no room.

        places: of the sessions in that step, by name.
        """
        self._apply_inbox()
        self._tell_load()
        if self._find_work() is not None:
            return None
        step = plan_behind_step(self.admission.sessions, places, self._plan, self._settings)
        if step is None or not self.runner.kv.reserve(step.work):
            return None
        return step

    def _find_work(self) -> Work | None:
        sessions = self.admission.sessions
        foresight = 0.0 if len(sessions) == 1 else _FORESIGHT  # a draft's only session holds up no other
        return find_work(sessions, foresight, self._settings)

    def next_deadline(self) -> float | None:
        """Return the seconds until a step that was put off should begin in any case; None if none was."""
        return max(0.0, self._put_off - time.perf_counter()) if self._put_off else None

    def execute(self, step: DraftStep) -> DraftStepResult:
        """Run the model. Runs in the model thread; touches no session but through its KV."""
        started = time.perf_counter()
        rounds = self.runner.draft_rounds([item.request for item in step.rounds]) if step.rounds else []
        if step.inputs:
            self.runner.forward(step.inputs)
        return DraftStepResult(rounds, time.perf_counter() - started)

    def finish_step(self, step: DraftStep, result: DraftStepResult) -> None:
        """Take what a step gave, and send it in one frame: a target does not begin with a part of it."""
        if not step.inputs:
            self.round_seconds = result.seconds
        self._trace(step, result.seconds)
        taken: list[tuple[DraftSession, RoundAhead | DraftedTokens | None]] = []
        for planned, output in zip(step.rounds, result.rounds, strict=True):
            session = planned.session
            if session.grammar is not None and session.grammar.error:
                self.admission.fail(session, session.grammar.error)
            elif all(branch.probs is None or np.isfinite(branch.probs).all() for branch in output.branches):
                take_round(planned, output, self._plan, result.seconds)
                taken.append((session, session.ahead if planned.ahead else session.drafted))
            else:
                self.admission.fail(session, "the draft's logits are NaN or infinite")
        self._apply_inbox()
        # Of a round whose verdict has come meanwhile one branch is said at most.
        for session, drafted in taken:
            if session.peer.sessions.get(session.id) is not session:
                continue
            if isinstance(drafted, RoundAhead) and session.ahead is drafted:
                send_ahead(session, drafted, self.counters)
            elif drafted is not None and session.drafted is drafted:
                send_round(session, self.counters)
        for session in step.reading:
            self.runner.kv.index_prefix(session.kv, session.tokens, session.committed)

    def _trace(self, step: DraftStep, seconds: float) -> None:
        """Add the spans of a step that has just ended to the traces of those of its sessions that are traced."""
        for item in step.rounds:
            at = item.session.at
            self._spans.add(
                item.session.traceparent, "draft.round", seconds, round=at.round + item.ahead, ahead=item.ahead
            )
        for session, given in zip(step.reading, step.inputs, strict=True):
            self._spans.add(session.traceparent, "draft.prefill", seconds, tokens=len(given.tokens))

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
