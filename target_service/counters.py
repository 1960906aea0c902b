"""Counts and traces the rounds of a target."""

from collections import Counter

from specahead.wire.messages import Commit
from target_service.verify_step import VerifyRound

# Rounds that the text itself, or the target's own sparse attention, proposed; their tokens; of these, accepted ones.
_BY_LOOKUP = "lookup_rounds", "lookup_draft_tokens", "lookup_accepted_tokens"
_BY_ITSELF = "self_rounds", "self_draft_tokens", "self_accepted_tokens"
# Counters that are there before they count: Prometheus sees no rise in one that begins with 1.
COUNTED = (
    *("failed_steps", "failed_sessions", "drafting_pauses", "drafting_probes", "draft_timeouts", "plain_rounds"),
    "steps_chained_to_steps",  # launched before the host had seen the one before
    "steps_chained_to_rounds",  # launched before the host had seen what was drafted
    "rounds_chained_to_steps",  # steps of a draft in the target, launched before the host had seen the verdicts
    *_BY_LOOKUP,
    *_BY_ITSELF,
    *("screening_rounds", "screened_tokens", "confirmed_tokens"),
    "accepted_alternatives",
    *("audited_rounds", "raised_budgets", "sessions_made_exact"),
)


def count_round(counters: Counter[str], item: VerifyRound, commit: Commit, accepts_alternative: bool) -> None:
    """Count a round, and who proposed in it."""
    counters["accepted_alternatives"] += accepts_alternative
    counters["committed_tokens"] += 0 if item.screens else len(commit.tokens)
    counters["screening_rounds"] += item.screens
    counters["screened_tokens"] += commit.screened
    counters["confirmed_tokens"] += commit.confirmed
    counters["rounds" if commit.drafted else "plain_rounds"] += 1
    counters["foreseen_rounds"] += item.session.draft.foreseen
    counters[f"rounds_gamma_{commit.drafted}"] += 1
    if commit.drafted and item.proposal is None:
        rounds, draft_tokens, accepted_tokens = _BY_ITSELF if item.drafting_cost else _BY_LOOKUP
        counters[rounds] += 1
        counters[draft_tokens] += commit.drafted
        counters[accepted_tokens] += commit.accepted
