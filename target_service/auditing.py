"""Audits of `approximate` sessions: a few of their rounds are verified densely, too, and the divergence is held.

An audited round runs sparsely and then densely (specahead.engine.steps.auditing), so it costs a dense pass, and its
verdict is exact. What counts is the total variation of the two distributions, averaged over the tokens of its verdict.
It is what reading sparsely changes in this round; the KV of the tokens before stays as their rounds have left it.

All sessions audit in the same step, since they then share the dense pass. A session in doubt audits each round, which
also makes its rounds exact meanwhile: one that an audit found beyond the limit, or that has begun to read more. Two
factors decide how much a session reads: one of all sessions, by the audits of those that read by it alone, and its own
(target_service.policy.holding). A session that has to read everything by its own is served exactly to its end.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specahead.config.speculation import AUDIT_SHARE, Speculation
from specahead.engine.steps.inputs import SequenceOutput
from specahead.sparsity.plan import Plan
from target_service.hooks import Hooks
from target_service.policy import Load
from target_service.policy.holding import Holding
from target_service.session import SessionAudit, TargetSession
from target_service.verify_step import VerifyRound, VerifyStep

log = logging.getLogger(__name__)
_OTHER_TEXTS = (
    "an approximate session is served exactly from now on: reading sparsely changed its distributions too much. Its "
    "text may be of another kind than those that the plan was calibrated on: calibrate with texts like the served ones"
)
FIRST_AUDIT = 4  # steps before the first audit; each next one comes after twice as many, up to the usual number
DOUBTED_ROUNDS = 4  # of a session that are audited one after the other, from the last reason to doubt on
TRUST = 4.0  # of the factor of all sessions (Holding.trust): one or two sessions that diverge do not change it
NEWEST = 1 / 64  # weight of the newest audit in the means that are reported


def without_needless_audits(speculation: Speculation, hooks: Hooks) -> Speculation:
    """Return a speculation without audits where hooks impose the verdicts, unless it asks for audits."""
    asks = speculation.audit_share is not None
    return replace(speculation, audit_share=0.0) if hooks.imposes_verdicts and not asks else speculation


@dataclass
class Found:
    """Means over the audits of all sessions, in which older ones fade."""

    audits: int = 0
    means: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Total variation, Kullback-Leibler divergence in nats, and the share of tokens that are the same if greedy."""

    def add(self, values: list[float]) -> None:
        """Add the means over the tokens of an audited round."""
        self.audits += 1
        weight = max(NEWEST, 1 / self.audits)
        self.means = [mean + weight * (value - mean) for mean, value in zip(self.means, values, strict=True)]


class Auditor:
    """Decides which rounds are audited, and how much each session reads."""

    def __init__(
        self, plan: Plan, speculation: Speculation, counters: Counter[str], dense_per_sparse: Callable[[Load], float]
    ) -> None:
        """dense_per_sparse: returns how many times as long a dense round takes as a sparse one, under a load."""
        self._plan, self._share, self._counters = plan, speculation.audit_share, counters
        self._limit = plan.max_divergence if speculation.max_divergence is None else speculation.max_divergence
        self._dense_per_sparse = dense_per_sparse
        self._all, self._found = Holding(self._limit, 1 / plan.budget, TRUST), Found()
        self._steps, self._every = 0, FIRST_AUDIT  # since the last audit; from one to the next

    @property
    def gauges(self) -> dict[str, float]:
        """What audits have found, by the names that a service's status has for it."""
        variation, nats, same = self._found.means
        return {
            "audit_total_variation": variation,
            "audit_kl_divergence": nats,
            "audit_same_greedy": same,
            "audit_bound": self._all.bound,
            "audit_max_divergence": self._limit,
            "audit_budget_factor": self._all.factor,
            "audit_steps_between": self._every,
        }

    def begin(self, session: TargetSession) -> None:
        """Audit a session that takes announcements from now on."""
        if self._share != 0 and session.reading.is_announced:
            if session.reading.audit is None:
                session.reading.audit = SessionAudit(Holding(self._limit, 1 / self._plan.budget))
            self._set_budget(session)

    def is_due(self, session: TargetSession) -> bool:
        """Return whether a session's next round is audited, if it reads sparsely."""
        audit = session.reading.audit
        if audit is None or audit.is_exact:
            return False
        return audit.doubted > 0 or self._steps + 1 >= self._every

    def note_round(self, item: VerifyRound, output: SequenceOutput, accepted: int) -> None:
        """Take note of a session's round that was judged. accepted: its proposed tokens that were accepted."""
        session, audit = item.session, item.session.reading.audit
        if audit is None:
            return
        if output.divergence is not None:
            # Tokens after the verdict's are none of the text's.
            values = output.divergence[: accepted + 1].mean(0).tolist()
            self._found.add(values)
            self._counters["audited_rounds"] += 1
            self._hold(session, audit, values[0])
        self._set_budget(session)

    def _hold(self, session: TargetSession, audit: SessionAudit, variation: float) -> None:
        own, before = audit.holding, audit.holding.factor
        if own.factor == 1:
            self._all.note(variation)
        own.note(variation)
        doubts = own.factor > before or variation > self._limit
        audit.doubted = DOUBTED_ROUNDS if doubts else max(0, audit.doubted - 1)
        if own.factor > before:
            self._counters["raised_budgets"] += 1
            self._set_budget(session)
            if session.reads_wholly:
                audit.is_exact = True
                if not self._counters["sessions_made_exact"]:
                    log.warning(_OTHER_TEXTS, extra={"max_divergence": self._limit, "found": round(variation, 3)})
                self._counters["sessions_made_exact"] += 1

    def _set_budget(self, session: TargetSession) -> None:
        reader, audit, plan = session.reading.reader, session.reading.audit, self._plan
        assert reader is not None and audit is not None
        factor = math.inf if audit.is_exact else self._all.factor * audit.holding.factor
        if factor != audit.applied:
            audit.applied = factor
            budget = 1.0 if factor >= 1 / plan.budget else plan.budget * factor
            least = plan.least_tokens if audit.is_exact else round(plan.least_tokens * factor)
            reader.plan = replace(plan, budget=budget, least_tokens=least)

    def note_step(self, step: VerifyStep, load: Load) -> None:
        """Take note of a step whose rounds are noted."""
        if all(item.session.reading.audit is None for item in step.rounds):
            return
        self._steps += 1
        audited = any(item.input.audit is not None for item in step.rounds)
        if self._steps < self._every or not (audited or self._all.reads_all):
            return
        if self._all.reads_all:  # nothing diverges
            self._all.note(0.0)
        self._steps, self._every = 0, min(2 * self._every, self._usual(load))

    def _usual(self, load: Load) -> int:
        """Return how many steps there are from one audit to the next."""
        if self._share:
            return math.ceil(1 / self._share)
        return math.ceil(max(1.0, self._dense_per_sparse(load)) / AUDIT_SHARE)
