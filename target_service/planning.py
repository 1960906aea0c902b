"""Plans a step: it runs every session whose proposal has come (γ + 1 tokens each), every session that no draft serves
for now (one token each and the tokens that it proposes itself), and a share of the unread prompts.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from specahead.engine.kv.cache import KVCache
from specahead.wire.messages import Proposal
from target_service.auditing import Auditor
from target_service.confirming import how_each_confirms, screen_lightly
from target_service.device_chain import DraftedRound, plan_following_step, plan_judging_step
from target_service.patience import Patience
from target_service.planned_round import audit_round, plan_end_of_prompt, plan_round
from target_service.policy import Load, Policy, Proposer
from target_service.prompts import LEAST_PART, is_followed_by_round, plan_reading, share_prompts
from target_service.self_drafting import SelfDrafting
from target_service.session import TargetSession
from target_service.target import Target
from target_service.verify_step import VerifyRound, VerifyStep

MUCH = 1024  # tokens: reading more takes several times as long as rounds


class StepPlanner:
    """Plans the steps of a target."""

    def __init__(
        self, target: Target, policy: Policy, drafting: SelfDrafting | None, patience: Patience, auditor: Auditor
    ) -> None:
        """drafting: what sessions read to draft for themselves; None: none does. patience: how long the target waits
        for a draft.
        """
        self._runner, self._plan, self._settings = target.runner, target.plan, target.settings
        self._counters, self._policy = target.counters, policy
        self._drafting, self._patience, self._auditor = drafting, patience, auditor
        self._parts_read = 0  # steps that read prompts
        self._gives_way = False  # whether the next step reads no prompts if it has rounds

    def plan(self, sessions: Iterable[TargetSession], now: float) -> VerifyStep | None:
        """Return the next step of these sessions, in order of their arrival; None if there is nothing to run."""
        step = VerifyStep()
        reading: list[TargetSession] = []
        alone: list[TargetSession] = []
        proposed: list[tuple[TargetSession, Proposal]] = []
        for session in sessions:
            if session.unread > 0:
                reading.append(session)
            elif self.waits(session, now):
                continue
            elif (proposal := _proposal_of(session)) is not None:
                proposed.append((session, proposal))
            else:
                alone.append(session)
        step.rounds = self._plan_rounds(proposed, alone, now)
        self._plan_prompts(step, reading)
        return step if step.rounds or step.prefills else None

    def plan_following(self, running: VerifyStep, sessions: list[TargetSession], now: float) -> VerifyStep:
        """Return the step to launch while `running` runs, or a step that only waits for it."""
        drafted, cost = drafted_for_themselves(sessions, self._policy, self._runner.kv)
        waits, most = partial(self.waits, now=now), self._settings.most_drafted
        return plan_following_step(running, sessions, most, waits, self._drafting, drafted, cost)

    def plan_judging(
        self, rounds: Mapping[str, DraftedRound], sessions: list[TargetSession], now: float
    ) -> VerifyStep | None:
        """Return the step to launch after rounds that are being drafted, by session; None if there can be none."""
        if any(self._auditor.is_due(session) and session.announces for session in sessions):
            return None  # the host launches both passes of an audited round
        beside, settings, waits = self._runner.alternatives_beside, self._settings, partial(self.waits, now=now)
        light, most = settings.screens_lightly, settings.most_drafted
        return plan_judging_step(sessions, rounds, self._plan, waits, beside, light, most, now)

    def waits(self, session: TargetSession, now: float) -> bool:
        """Return whether a session has no part in a step at the time `now`: it waits for its grammar, or for its draft.

        One that waits for its draft too long is decoded plainly until the draft is ready again. One that begins never
        waits for its draft, which may still be reading the prompt.
        """
        if session.unread > 0:
            return False
        if session.asked.grammar is not None and not session.asked.grammar.ready:
            return True
        if not session.awaits_draft:
            return False
        if session.stats.waiting_since is None:
            session.stats.waiting_since = now
        if now - session.stats.waiting_since < self._patience.seconds:
            return True
        self._counters["draft_timeouts"] += 1
        session.draft.awaited = False
        return False

    def _plan_prompts(self, step: VerifyStep, reading: list[TargetSession]) -> None:
        """Add parts of prompts to a step. Where one is the last, the session's round follows in the same pass.

        After a step that read many tokens of short prompts while a long prompt waits, the next step that has rounds
        reads none, so that sessions go on meanwhile.
        """
        if step.rounds and self._gives_way:
            self._gives_way = False
            return
        deterministic, chunk = self._runner.deterministic, self._settings.prefill_chunk
        shared = share_prompts(reading, chunk, bool(step.rounds), self._parts_read)
        longest = max((session.unread for session in reading), default=0)
        self._gives_way = MUCH < sum(share for _, share in shared) <= chunk // LEAST_PART < longest
        self._parts_read += bool(shared)
        for session, share in shared:
            if is_followed_by_round(session, share, deterministic):
                proposal = _proposal_of(session)
                own = session.look_up(self._settings.most_drafted) if proposal is None else proposal.tokens
                step.rounds.append(plan_end_of_prompt(session, proposal, own))
            else:
                part = plan_reading(session, share, self._settings.widest_round, deterministic)
                step.prefills.append((session, part))

    def _plan_rounds(
        self, proposed: list[tuple[TargetSession, Proposal]], alone: list[TargetSession], now: float
    ) -> list[VerifyRound]:
        """Return the rounds of sessions with a proposal of their draft, and of those without. Of the latter all that
        can draft for themselves do, or none; then what their own texts propose is judged.
        """
        kv, given = self._runner.kv, [(each, own, own.tokens) for each, own in proposed]
        texts: list[tuple[TargetSession, Proposal | None, list[int]]] = [*given]
        gamma, cost = drafted_for_themselves(alone, self._policy, kv)
        if not gamma:
            texts += [(session, None, session.look_up(self._settings.most_drafted)) for session in alone]
        away = {each.id for each, *_ in texts if each.screening is not None and not kv.is_resident(each.kv)}
        # Guesses are judged densely.
        counts = [(each, 0 if each.is_guessing else len(tokens)) for each, _, tokens in texts]
        confirms = how_each_confirms(counts, away)
        rounds = [plan_round(each, proposal, tokens, now, confirms[each.id]) for each, proposal, tokens in texts]
        for item in rounds:
            if self._auditor.is_due(item.session):
                audit_round(item)
        if gamma:
            rounds += self._plan_drafting(alone, gamma, cost, now)
        if self._settings.screens_lightly:
            screen_lightly(rounds, away)
        return rounds

    def _plan_drafting(self, sessions: list[TargetSession], gamma: int, cost: float, now: float) -> list[VerifyRound]:
        """Return the rounds of sessions that draft `gamma` tokens for themselves, at a cost in plain steps."""
        drafting, rounds = self._drafting, list[VerifyRound]()
        assert drafting is not None
        for session in sessions:
            memory, base = None if session.is_paused else session.reading.memory, len(session.tokens)
            drafts = memory is not None and drafting.can_draft(session.reading.weighed, base)
            item = plan_round(session, None, [0] * gamma if drafts else [], now)
            if memory is not None:
                item.input.read, item.drafting_cost = drafting.read(memory, base, gamma if drafts else 0), cost
            rounds.append(item)
        return rounds


def drafted_for_themselves(sessions: Iterable[TargetSession], policy: Policy, kv: KVCache) -> tuple[int, float]:
    """Return how many tokens each of these sessions, without a proposal of a draft, drafts in a step of their own, and
    the tokens of each that have to be accepted to pay for it.
    """
    plan = policy.plan
    if plan.proposer is not Proposer.SELF:
        return 0, 0.0
    able = [session for session in sessions if session.reading.memory is not None and not session.is_paused]
    if not able:
        return 0, 0.0
    tokens = sum(len(session.tokens) for session in able)
    away = sum(len(session.tokens) for session in able if not kv.is_resident(session.kv))
    load, sizes = Load(len(able), tokens, away=away), policy.costs.sizes
    return plan.gamma, sizes.own_drafting(plan.gamma, load) / sizes.plain(load)


def _proposal_of(session: TargetSession) -> Proposal | None:
    """Return the proposal to verify in a session's next round, if it is here and the round is to be drafted."""
    return session.ready_proposal() if session.pace.next_round.gamma and not session.awaits_its_end else None
