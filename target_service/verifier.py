"""The target's verifier, which runs its sessions step by step. Knows nothing of gRPC.

Its pieces: admission.py owns which sessions there are, protocol.py which drafts; planning.py says what a step runs,
commit.py what of it is committed, pacing.py how the next rounds are made. What is known of a session lies in
session.py.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from specahead.config import TargetSettings
from specahead.engine.kv.pages import pages_for
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from specahead.engine.steps.device_chain import DeviceChain, Imposed
from specahead.engine.steps.inputs import SequenceOutput, SparseRead
from specahead.engine.steps.requests import gammas
from specahead.engine.steps.runner import TargetRunner
from specahead.engine.steps.step_loop import describe, prefill_chunk
from specahead.sparsity.announce import announced_rows
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from specahead.wire.errors import ServiceError
from target_service.admission import Admission
from target_service.auditing import Auditor, without_needless_audits
from target_service.committing import Committer
from target_service.counters import COUNTED
from target_service.device_chain import DraftedRound, may_be_followed
from target_service.hooks import NO_HOOKS, Hooks
from target_service.opening import SessionMaker
from target_service.pacing import Pacing, policy_of
from target_service.patience import Patience
from target_service.planning import StepPlanner
from target_service.prompts import LEAST_PART
from target_service.protocol import DraftProtocol
from target_service.reporting import ReadingRate
from target_service.screening import screening_reader
from target_service.self_drafting import SelfDrafting
from target_service.session import TargetSession
from target_service.target import Target
from target_service.verify_step import VerifyResult, VerifyStep

log = logging.getLogger(__name__)


class Verifier:
    """Runs sessions on a target model, step by step: plan_step, execute, then finish_step or fail_step.

    `admission` opens sessions; `protocol` takes drafts and their events. hooks: of tests and benchmarks. grammars:
    compiles those of sessions. Raises ValueError if the KV's tiers are too small for the settings.
    """

    def __init__(
        self,
        runner: TargetRunner,
        plan: Plan,
        settings: TargetSettings,
        hooks: Hooks = NO_HOOKS,
        grammars: Grammars | None = None,
    ) -> None:
        chunk = prefill_chunk(settings.prefill_chunk, runner.kv.device)
        device = str(runner.kv.device) if settings.device == "auto" else settings.device
        settings = replace(settings, prefill_chunk=chunk, device=device)
        a_session = pages_for(settings.widest_round) + 2
        pages = settings.max_sessions * a_session + pages_for(settings.prefill_chunk)
        who = f"{settings.max_sessions} sessions, and {settings.prefill_chunk} prompt tokens a step"
        runner.kv.check_writable(pages, who)
        self.runner, self.plan, self.settings = runner, plan, settings
        by_gamma = [f"rounds_gamma_{gamma}" for gamma in gammas(settings.most_drafted)]
        self.counters: Counter[str] = Counter(dict.fromkeys((*COUNTED, *by_gamma), 0))
        self.reading = ReadingRate()
        self.patience = Patience(settings.draft_timeout)
        self._hooks = hooks
        self.under_way: VerifyStep | None = None
        """The asynchronous step that the next one waits for."""
        self._ended = 0.0  # when the last one had ended, by time.perf_counter
        self._drafting = (
            SelfDrafting.over(plan, settings.self_read_share, settings.most_drafted)
            if settings.drafts_for_itself
            else None
        )
        target = Target(runner, plan, settings, self.counters, hooks)
        maker = SessionMaker(target, grammars, self._drafting, lambda: self.policy.serves_exactly)
        self.admission = Admission(target, maker)
        self.policy = policy_of(target)
        self.pacing = Pacing(target, self.policy, self.admission.running)
        self.protocol = DraftProtocol(target, self.admission.running, self.patience)
        speculation = without_needless_audits(settings.speculation, hooks)
        self._auditor = Auditor(plan, speculation, self.counters, self.policy.dense_per_sparse)
        self._planner = StepPlanner(target, self.policy, self._drafting, self.patience, self._auditor)
        self._committer = Committer(target, self.admission, self.protocol, self.pacing, self._auditor)
        runner.keep_memories(settings.max_sessions + 1)  # a session may end in the step that runs
        reads_by_memory = (self._drafting is not None or settings.most_held > 0) and plan.group_size > 0
        if reads_by_memory or plan.uses_means:
            runner.kv.keep_group_means(plan.group_size, variance_limit=plan.variance_limit)

    def warm_up(self) -> None:
        """Prepare the runner for the steps of plain, exact and approximate sessions."""
        reads, screening = self._kinds_of_reads()
        self.runner.warm_up_prompts(self.settings.prefill_chunk)
        own_gammas = [] if self._drafting is None else self.policy.options.gammas
        self.runner.warm_up(reads, self.settings.max_sessions, own_gammas, screening, self.settings.screens_lightly)

    def _kinds_of_reads(self) -> tuple[list[SparseRead | None], list[SparseRead | None]]:
        """Return one read of each kind that rounds have, and of those that screen; None reads everything."""
        reads: list[SparseRead | None] = [None]
        reader = Reader(replace(self.plan, least_tokens=0))
        nothing = BlockSelection.of_nothing(reader.announced_rows, self.plan.num_blocks(1))
        if (read := reader.read(nothing, 1, 1 + self.settings.most_drafted)) is not None:
            reads.append(read)
            if self.runner.leaves_states:
                reads.append(replace(reader, is_announced=False).read(None, 1, 1))
        screening: list[SparseRead | None] = []
        if self.settings.most_held:
            screener = screening_reader(self.plan, self.settings.self_read_share)
            reads.append(screener.read(None, 1, 1))
            screener.finish(SequenceOutput())  # its first round reads everything, as confirming ones do
            screening.append(screener.read(None, 1, 1))
        if self._drafting is not None:
            reads.append(self._drafting.read(self._drafting.new_memory(), 1, 0))
        return reads, screening

    @property
    def reads_short_prompts(self) -> bool:
        """Whether a session waits for its first token whose prompt is so short that the next step reads its end, or
        may be, since what is known of its prompt is not looked up yet.
        """
        least = self.settings.prefill_chunk // LEAST_PART
        return self.admission.admits or any(0 < each.unread <= least for each in self.admission.running.values())

    @property
    def is_idle(self) -> bool:
        """Whether there is no session."""
        return next(self.admission.everyone(), None) is None

    @property
    def totals(self) -> dict[str, float]:
        """Counters since the start, those of KV tiers included."""
        return {**self.counters, **self.runner.kv.totals}

    @property
    def gauges(self) -> dict[str, float]:
        """What there is at the moment, by name."""
        running, proposes = self.admission.running.values(), bool(self.policy.options.gammas)
        return {
            **self.runner.kv.gauges,
            **self.policy.choice.gauges,
            **self._auditor.gauges,
            "sessions": len(running),
            "queued_sessions": len(self.admission.queue) + len(self.admission.preempted),
            "preempted_sessions": len(self.admission.preempted),
            "kv_pages_held": self.runner.kv.pool.held,
            "kv_pages": self.runner.kv.pool.num_pages,
            "draining": self.admission.draining,
            "drafts": len(self.protocol.drafts),
            "takes_drafts": self.settings.has_draft and not self.settings.draft_in_target,
            "drafted_sessions": sum(session.draft.awaited for session in running),
            "paused_sessions": sum(not session.pace.next_round.gamma for session in running) if proposes else 0,
        }

    # Ending sessions.

    def abort(self, name: str) -> None:
        """End a session, also during a step on it; unknown ones are ignored, since an abort may cross the end."""
        session = next((session for session in self.admission.everyone() if session.id == name), None)
        if session is not None:
            self.counters["aborted_sessions"] += session not in self.admission.queue
            self._committer.close(session)

    def close_all(self, error: ServiceError) -> None:
        """Tell every session's owner why it ends."""
        self.settle()
        for session in self.admission.everyone():
            session.fail(error)

    # Steps.

    def plan_step(self) -> VerifyStep | None:
        """Admit sessions for which there is room, and return what to run next; None if there is nothing.

        The pages that it writes are taken; where they run out, sessions give way, the youngest first.
        """
        self.admission.release_closed()
        self._start_admitted()
        return self._plan_with_room() if self.under_way is None else self._plan_chained(self.under_way)

    def _start_admitted(self) -> None:
        admitted = self.admission.admit()
        for session in admitted:
            self._auditor.begin(session)
        if admitted:
            # Once for all: it takes a millisecond, in which the device may have nothing to do.
            self.pacing.choose_anew(admitted)
        for session in admitted:
            self.pacing.begin(session)
            self.protocol.assign(session, wait=True)

    def _plan_with_room(self) -> VerifyStep | None:
        while (step := self._truncate_held(self._planner.plan(self._running, time.monotonic()))) is not None:
            if self.runner.kv.reserve(step.work):
                step.asynchronous = self.runner.chains_steps and may_be_followed(step)
                break
            *_, youngest = self._running
            self.protocol.end(youngest)
            self.admission.preempt_youngest()
        return step

    @property
    def _running(self) -> list[TargetSession]:
        return list(self.admission.running.values())

    def make_chain(self) -> DeviceChain | None:
        """Have steps judge what rounds of a draft in this process leave on the device, before `warm_up`."""
        own, rows = self.settings.own_draft, announced_rows(self.plan)
        most, block_size = self.settings.max_sessions, self.plan.block_size
        return self.runner.make_chain(most, own.most_drafted, own.support, rows, block_size)

    def imposed_verdicts(self, step: VerifyStep) -> list[Imposed] | None:
        """Return the verdicts that replace those of a step; None: its own verdicts count."""
        if self._hooks.judge is None:
            return None
        return [self._hooks.judge(item, self.runner.vocab_size) for item in step.rounds]

    def _imposed_before(self, step: VerifyStep) -> list[Imposed] | None:
        """Return what will be committed of the step that this one follows, where it is not what that gives."""
        if step.before is None or all(item.input.follows is None for item in step.rounds):
            return None
        return self.imposed_verdicts(step.before)

    def plan_chained_step(self, rounds: Mapping[str, DraftedRound]) -> VerifyStep | None:
        """Return the step to launch after rounds that are being drafted, by session; None if there can be none."""
        step = self._truncate_held(self._planner.plan_judging(rounds, self._running, time.monotonic()))
        if step is None or not self.runner.kv.reserve(step.work):
            return None
        self.counters["steps_chained_to_rounds"] += 1
        return step

    def _plan_chained(self, under_way: VerifyStep) -> VerifyStep:
        """Return what to run while a step is under way, or a step that only waits for it."""
        step = self._planner.plan_following(under_way, self._running, time.monotonic())
        if not self.runner.kv.reserve(step.work):
            return VerifyStep(before=under_way)
        self.counters["steps_chained_to_steps"] += step.asynchronous
        return step

    def _truncate_held(self, step: VerifyStep | None) -> VerifyStep | None:
        """Truncate the KV of tokens that a step is to confirm, which writes it anew; return the step."""
        for item in step.rounds if step else []:
            if item.held:
                self.runner.kv.truncate(item.session.kv, len(item.session.tokens) - item.held - 1)
        return step

    def next_deadline(self) -> float | None:
        """Return the seconds until a session's patience with its draft ends; None if none is waiting."""
        since = [session.stats.waiting_since for session in self.admission.running.values()]
        waiting = [start for start in since if start is not None]
        if not waiting:
            return None
        return max(0.001, min(waiting) + self.patience.seconds - time.monotonic())

    def execute(self, step: VerifyStep) -> VerifyResult:
        """Run a step, in the model's thread; touches no session but through its KV."""
        step.began = time.perf_counter()
        if step.asynchronous:
            step.under_way = self.runner.launch(step.inputs, self._imposed_before(step))
        ending = step.ending
        if ending is None:
            return VerifyResult([], [], 0.0)
        outputs = ending.under_way() if ending.under_way is not None else self.runner.forward(ending.inputs)
        rounds = len(ending.rounds)
        read = zip(ending.prefills, outputs[rounds:], strict=True)
        prompts = [_prompt_logprobs(session, output) for (session, _), output in read]
        before, self._ended = self._ended, time.perf_counter()
        return VerifyResult(outputs[:rounds], prompts, self._ended - max(before, ending.began))

    def finish_step(self, step: VerifyStep, result: VerifyResult, settles: bool = True) -> None:
        """Commit what a step gave, or the one that it waited for; sessions that have ended are passed over.

        settles: whether `settle` follows at once; else the caller calls it soon.
        """
        ending, step.before = step.ending, None
        self.under_way = step if step.asynchronous else None
        if ending is None:
            return
        read = sum(count for _, count in ending.prompt_tokens)
        if 2 * read > self.settings.prefill_chunk:
            self.reading.add(read, result.seconds)
        waits = (item.wait_seconds for item in ending.rounds if item.proposal)
        self.patience.note(max(result.seconds, *waits, 0.0))
        self._committer.commit(ending, result, self.under_way, time.monotonic(), settles)

    def settle(self) -> None:
        """Do what can wait until the next step runs, of all that was committed: tell the sessions' owners, and let the
        policy choose.
        """
        self._committer.settle(self.under_way)

    def fail_step(self, step: VerifyStep, error: Exception) -> bool:
        """End the sessions of a step that raised `error` with INTERNAL; returns True, since the others can continue."""
        self.settle()
        taking_part = [*step.sessions, *(step.before.sessions if step.before is not None else ())]
        failed = [session for session in dict.fromkeys(taking_part) if self.admission.is_open(session)]
        self.under_way = None
        reason = describe(error)
        log.error("a step of the target failed, which ends its %d sessions: %s", len(failed), reason)
        log.debug("the step that failed", exc_info=error)
        self.counters["failed_steps"] += 1
        self.counters["failed_sessions"] += len(failed)
        for session in failed:
            session.fail(ServiceError(f"the target failed in a step of this request: {reason}"))
            self._committer.close(session)
        return True


def _prompt_logprobs(session: TargetSession, output: SequenceOutput) -> list[TokenLogprobs]:
    """Return the log probabilities of the tokens after the prompt tokens that were just read, if requested."""
    if session.prompt_logprobs is None:
        return []
    assert output.logits is not None
    assert session.asked.logprobs is not None
    end = session.kv.length
    tokens = session.tokens[end - len(output.logits) + 1 : end + 1]
    return token_logprobs(output.logits, tokens, session.asked.logprobs)
