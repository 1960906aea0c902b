"""Gives the sessions of a step that has ended what it gave, and tells their owners and drafts."""

import logging
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Committed:
    """A round that was committed, and that nobody has taken note of."""

    item: VerifyRound
    commit: Commit
    told: Commit | None
    """What its session's owner is told; None: nothing yet."""
    seen: StepSeen
    has_alternative: bool
    """Whether the last accepted token is an alternative."""


class Committer:
    """Commits what steps give."""

    def __init__(
        self, target: Target, admission: Admission, protocol: DraftProtocol, pacing: Pacing, auditor: Auditor
    ) -> None:
        self._runner, self._kv, self._plan = target.runner, target.runner.kv, target.plan
        self._counters, self._hooks = target.counters, target.hooks
        self._admission, self._protocol, self._pacing, self._auditor = admission, protocol, pacing, auditor
        self._unsettled: list[_Committed] = []
        self._ended: list[tuple[VerifyStep, StepSeen]] = []  # steps that the policy has not seen

    def close(self, session: TargetSession) -> None:
        """End a session, for its draft as well."""
        self._protocol.end(session)
        self._admission.close(session)

    def commit(
        self, step: VerifyStep, result: VerifyResult, queued: VerifyStep | None, now: float, settles: bool = True
    ) -> None:
        """Commit what a step gave; sessions that have ended are passed over.

        queued: the step that was launched after it, if there is one. now: the time, by time.monotonic. settles: whether
        `settle` follows at once; else the caller calls it soon, and what it decides holds for the next round but one.
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
                self._finish_round(item, output, seen, rows.get(id(item.session), 0), settles)
        self._ended.append((step, seen))
        if settles:
            self.settle(queued)

    def settle(self, running: VerifyStep | None) -> None:
        """Do what can wait until the next step runs: tell the sessions' owners what was committed since the last call,
        take note of it, and let the policy choose.

        running: the step that runs, if one does. Whether its sessions go alone is decided when their rounds end.
        """
        unsettled, self._unsettled = self._unsettled, []
        taking_part = {session.id for session in (running.sessions if running is not None else ())}
        for committed in unsettled:
            session = committed.item.session
            self._settle(committed)
            if self._admission.is_open(session) and session.goes_alone and session.id not in taking_part:
                self._protocol.end(session)
        ended, self._ended = self._ended, []
        for step, seen in ended:
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

    def _finish_round(
        self, item: VerifyRound, output: SequenceOutput, seen: StepSeen, queued: int, settles: bool
    ) -> None:
        """Commit a session's part of a step. queued: its tokens in a step that was launched after this one. settles: as
        of `commit`.
        """
        session, key = item.session, item.session.key
        if self._fails(session, output):
            return
        reader = session.reading.reader
        if reader is not None:
            if item.input.follows is not None:
                reader.read_all(len(session.tokens))
            reader.finish(output)
        verdict = self._verdict(item, output)
        commit, known = commit_round(item, output, verdict, seen.seconds, self._plan, self._kv, queued)
        self._auditor.note_round(item, output, verdict[0])
        if item.drafting_cost:
            session.reading.weighed = commit.at.base
        told = _told(item, commit, output.supports)
        if session.kv_is_dense and not self._runner.deterministic:
            self._kv.index_prefix(session.kv, session.tokens)
        committed = _Committed(item, commit, told, seen, output.alternative is not None)
        # Who ends hears of it while there is a session; who goes alone next proposes what follows its newest tokens.
        if settles or commit.finish_reason is not FinishReason.NONE or session.goes_alone:
            self._settle(committed)
        else:
            self._unsettled.append(committed)
        self._go_on(committed, key, known)

    def _verdict(self, item: VerifyRound, output: SequenceOutput) -> tuple[int, int]:
        """Return how many tokens of a round are accepted, and the token after them: the step's, or a benchmark's."""
        assert output.verdict is not None
        if self._hooks.judge is None:
            return output.verdict
        accepted, following, alternative = self._hooks.judge(item, self._runner.vocab_size)
        output.alternative = alternative if alternative >= 0 else None
        return accepted, following

    def _go_on(self, committed: _Committed, key: tuple[int, int], known: bool) -> None:
        """End a session that has its last tokens; otherwise tell its draft of the round, or have it go on alone.

        key: the session's, before the round was committed. known: whether the draft knows the round.
        """
        item, commit, session = committed.item, committed.commit, committed.item.session
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

    def _settle(self, committed: _Committed) -> None:
        """Tell a session's owner of a committed round, take note of it, and set how the next one is made."""
        item, commit, session = committed.item, committed.commit, committed.item.session
        if committed.told is not None and self._admission.is_open(session):  # else it was aborted meanwhile
            session.asked.emit(committed.told)
        count_round(self._counters, item, commit, committed.has_alternative)
        self._pacing.note(item, commit, committed.seen, committed.has_alternative)
        session.guess()

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


def _told(item: VerifyRound, commit: Commit, supports: list[Support]) -> Commit | None:
    """Return what a session's owner is told of a round; None while its tokens are held back, to be confirmed."""
    session, screening = item.session, item.session.screening
    if screening is None:
        return commit
    if item.screens:
        screening.hold(commit, supports)
        return None
    whole = screening.release(commit, weighed=item.input.read is not None)
    session.kv.settled = screening.settled
    return whole
