"""Gives the sessions of a step that has ended what it gave, and tells their owners and drafts."""

import logging

from specahead.engine.sampling.distributions import Support
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.engine.steps.inputs import SequenceOutput
from specahead.wire.errors import InvalidArgument, ServiceError
from specahead.wire.messages import Commit, FinishReason
from target_service.admission import Admission
from target_service.auditing import Auditor
from target_service.commit import commit_round, verdict_on
from target_service.counters import count_round
from target_service.pacing import Pacing, StepSeen
from target_service.protocol import DraftProtocol
from target_service.session import TargetSession
from target_service.target import Target
from target_service.verify_step import VerifyResult, VerifyRound, VerifyStep

log = logging.getLogger(__name__)


class Committer:
    """Commits what steps give."""

    def __init__(
        self, target: Target, admission: Admission, protocol: DraftProtocol, pacing: Pacing, auditor: Auditor
    ) -> None:
        self._runner, self._kv, self._plan = target.runner, target.runner.kv, target.plan
        self._counters, self._hooks = target.counters, target.hooks
        self._admission, self._protocol, self._pacing, self._auditor = admission, protocol, pacing, auditor
        self._untold: list[tuple[TargetSession, Commit]] = []
        self._unsettled: list[tuple[VerifyStep, StepSeen]] = []

    def close(self, session: TargetSession) -> None:
        """End a session, for its draft as well."""
        self._protocol.end(session)
        self._admission.close(session)

    def commit(self, step: VerifyStep, result: VerifyResult, queued: VerifyStep | None, now: float) -> None:
        """Commit what a step gave; sessions that have ended are passed over. Call `settle` soon after.

        queued: the step that was launched after it, if there is one. now: the time, by time.monotonic.
        """
        for (session, _), prompt_logprobs in zip(step.prefills, result.prompts, strict=True):
            if self._admission.is_open(session):
                self._finish_reading(session, prompt_logprobs, result.seconds)
        fetched = sum(output.tokens_fetched for output in result.outputs)
        seen = self._pacing.see(step, fetched, result.seconds, now)
        rows = {id(item.session): item.input.rows for item in (queued.rounds if queued is not None else ())}
        for item, output in zip(step.rounds, result.outputs, strict=True):
            if item.is_void and self._admission.is_open(item.session):
                self._kv.truncate(item.session.kv, len(item.session.tokens) - 1)
            elif self._admission.is_open(item.session):
                if item.input.ends_prompt:
                    self._finish_reading(item.session, [], result.seconds)
                self._finish_round(item, output, seen, rows.get(id(item.session), 0))
        self._unsettled.append((step, seen))

    def settle(self) -> None:
        """Do what can wait until the next step runs: tell the sessions' owners what was committed since the last call,
        and let the policy choose.
        """
        untold, self._untold = self._untold, []
        for session, commit in untold:
            session.asked.emit(commit)
        unsettled, self._unsettled = self._unsettled, []
        for step, seen in unsettled:
            self._auditor.note_step(step, seen.load)
            self._pacing.finish(seen)

    def _finish_reading(self, session: TargetSession, prompt_logprobs: list[TokenLogprobs], seconds: float) -> None:
        """Take note that a step has read a part of a session's committed tokens."""
        session.stats.prefill_seconds += seconds
        if session.lookup is not None:  # a part at a time: a long text takes milliseconds
            session.lookup.extend(session.tokens, min(session.kv.length, len(session.tokens) - 1))
        if session.prompt_logprobs is not None:  # log probabilities of a prompt that is read again are sent once
            known = len(session.prompt_logprobs) - (session.kv.length - len(prompt_logprobs))
            session.prompt_logprobs += prompt_logprobs[known:]
        # A deterministic runner's KV is the same for all who read a prompt, not for those who generated it.
        dense = session.asked.prompt_tokens - 1 if self._runner.deterministic else None
        self._kv.index_prefix(session.kv, session.tokens, dense)

    def _finish_round(self, item: VerifyRound, output: SequenceOutput, seen: StepSeen, queued: int) -> None:
        """Commit a session's part of a step. queued: its tokens in a step that was launched after this one."""
        session, key = item.session, item.session.key
        if self._fails(session, output):
            return
        reader, verdict = session.reading.reader, output.verdict
        assert verdict is not None
        if reader is not None:
            if item.input.follows is not None:
                reader.read_all(len(session.tokens))
            reader.finish(output)
        if self._hooks.judge is not None:
            accepted, following, alternative = self._hooks.judge(item, self._runner.vocab_size)
            verdict, output.alternative = (accepted, following), alternative if alternative >= 0 else None
        commit, known = commit_round(item, output, verdict, seen.seconds, self._plan, self._kv, queued)
        if self._hooks.on_round is not None and reader is not None and reader.is_sparse:
            assert reader.chosen is not None
            self._hooks.on_round(commit.at, commit.accepted, reader.chosen)
        self._auditor.note_round(item, output, verdict[0])
        has_alternative = output.alternative is not None
        count_round(self._counters, item, commit, has_alternative)
        if item.drafting_cost:
            session.reading.weighed = commit.at.base
        self._note_for_owner(item, commit, output.supports)
        session.guess(commit.drafted if item.is_guessed else 0, commit.accepted)
        if session.kv_is_dense and not self._runner.deterministic:
            self._kv.index_prefix(session.kv, session.tokens)
        self._pacing.note(item, commit, seen, has_alternative)
        if commit.finish_reason is not FinishReason.NONE:
            self._protocol.end(session)
            if not item.screens:  # else it ends once these tokens are confirmed
                self._admission.close(session)
        elif session.draft.peer is None:
            self._protocol.assign(session)
        elif session.goes_alone:
            self._protocol.end(session)
        else:
            self._protocol.judge(session, key, verdict_on(commit, known, session))

    def _fails(self, session: TargetSession, output: SequenceOutput) -> bool:
        """Return whether a session cannot continue; then it is ended."""
        grammar = session.asked.grammar
        if grammar is not None and grammar.error:
            session.fail(InvalidArgument(grammar.error))
        elif not output.finite:
            log.error("session %s: the target's logits are NaN or infinite, which ends it", session.id)
            session.fail(ServiceError("the target's logits for this request are NaN or infinite"))
            self._kv.scrub(session.kv)
        else:
            return False
        self._counters["failed_sessions"] += 1
        self.close(session)
        return True

    def _note_for_owner(self, item: VerifyRound, commit: Commit, supports: list[Support]) -> None:
        """Have a session's owner told of a round, or hold its tokens back until they are confirmed."""
        session, screening = item.session, item.session.screening
        if screening is None:
            self._untold.append((session, commit))
        elif item.screens:
            screening.hold(commit, supports)
        else:
            self._untold.append((session, screening.release(commit, weighed=item.input.read is not None)))
            session.kv.settled = screening.settled
