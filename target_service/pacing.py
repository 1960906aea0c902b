"""Tells the policy what each step took and gave, and sets the policy's choice as the sessions' next rounds."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from specahead.engine.steps.requests import gammas
from specahead.wire.messages import Commit, FinishReason
from target_service.policy import (
    CostTable,
    Ended,
    Load,
    Measured,
    Options,
    Policy,
    Proposer,
    RoundKind,
    Sizes,
    Verified,
)
from target_service.session import TargetSession
from target_service.target import Target
from target_service.verify_step import VerifyRound, VerifyStep

ALIKE = 7 / 8  # share of the sessions that must propose equally many tokens for their rounds' time to be a figure


@dataclass
class StepSeen:
    """Figures of a step that has ended."""

    now: float
    """When it was committed, by time.monotonic."""
    load: Load
    kind: RoundKind
    """How most of its rounds were made."""
    disturbed: bool
    """Whether anything other than rounds took time since the step before: prompts, audits, or a graph's capture."""
    is_typical: bool
    """Whether most sessions make their rounds alike, so that their time is a figure of such rounds."""
    seconds: float
    """How long the step took."""
    rounds: int
    """Rounds that it had."""
    took: defaultdict[Verified, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds from one commit to the next, of each session whose last two rounds were made alike, by how its round was
    verified.
    """
    drafting: float = 0.0
    """Seconds that the draft took for its rounds."""


class Pacing:
    """Lets the policy decide over the rounds of the running sessions."""

    def __init__(self, target: Target, policy: Policy, sessions: Mapping[str, TargetSession]) -> None:
        """sessions: the running ones, by name."""
        self.policy, self._sessions = policy, sessions
        self._runner, self._speculation = target.runner, target.settings.chosen
        # Where verdicts are imposed, no proposal is useless.
        self._imposed = target.hooks.imposes_verdicts and not target.settings.adaptive
        self._captures_seen = 0
        self._draft_has_read = False  # in this process, prompts, since the last step

    def choose_anew(self, admitted: Iterable[TargetSession]) -> None:
        """Choose how rounds are made, for all sessions that run, those that were admitted just now included."""
        beginning = sum(not session.pace.acceptance.chances for session in admitted)
        self.policy.choose(self._load(everyone=True), beginning)

    def begin(self, session: TargetSession) -> None:
        """Set how a session's first round is made, unless it had one before it gave way. `choose_anew` comes before."""
        if session.screening is not None:
            session.screening.most = self.policy.plan.held
        if not session.pace.acceptance.chances:
            session.pace.acceptance = self.policy.new_acceptance()
            session.pace.next_round = self.policy.plan_of(session.pace, len(session.tokens), session.announces)

    def note_draft_reading(self, parts: Iterable[tuple[int, float]]) -> None:
        """Take note that the draft in this process reads prompts. parts: tokens and seconds of those that it has read
        since the last call.
        """
        self._draft_has_read = True
        for tokens, seconds in parts:
            self.policy.gains.reading.note_read(seconds, tokens)

    def see(self, step: VerifyStep, fetched: int, seconds: float, now: float) -> StepSeen:
        """Return the figures of a step that has ended at the time `now`; call it once for each step.

        fetched: (layer, KV head, token) triples that its rounds have brought from the host. seconds: that it took.
        """
        load, kind = self._load(), _kind_of(step)
        captured = self._runner.captures_made != self._captures_seen
        audited = any(item.input.audit is not None for item in step.rounds)
        disturbed = self._draft_has_read or bool(step.prompt_tokens) or captured or audited
        self._draft_has_read, self._captures_seen = False, self._runner.captures_made
        if step.rounds and (fetched or load.away):
            tokens = sum(len(item.session.tokens) for item in step.rounds)
            triples = self._runner.kv.num_layers * self._runner.kv.all_kv_heads
            self.policy.costs.sizes.note_fetched(kind.verified, fetched / triples / tokens)
        lasts = [session.pace.last_gamma for session in self._sessions.values()]
        others = sum(last >= 0 for last in lasts)
        is_typical = lasts.count(kind.gamma) >= (ALIKE if kind.gamma else 1) * others
        read = step.prompt_tokens
        for session, count in read:
            session.pace.prompt_tokens += count
            session.pace.prompt_seconds += seconds * count / sum(tokens for _, tokens in read)
        return StepSeen(now, load, kind, disturbed, is_typical, seconds, len(step.rounds))

    def note(self, item: VerifyRound, commit: Commit, seen: StepSeen, alternative: bool) -> None:
        """Take note of a round that was just committed, and set how its session's next round is made.

        alternative: whether the last accepted token is one.
        """
        session, pace = item.session, item.session.pace
        if commit.finish_reason is not FinishReason.NONE:
            prompt, read = session.asked.prompt_tokens, pace.prompt_tokens
            skippable = max(0, read - prompt + self._speculation.skipped_by_draft(prompt, announces=False))
            was_cut = commit.finish_reason is FinishReason.LENGTH
            self.policy.gains.reading.note_answer(read, len(session.tokens) - prompt, was_cut, skippable)
        beside = item.is_guessed and pace.next_round.gamma > 0  # of a draft, about which it says nothing
        since, pace.committed_at = pace.committed_at, None if seen.disturbed or beside else seen.now
        if session.screening is not None and not item.screens:
            if commit.screened:
                self.policy.gains.held.note(commit.screened, commit.confirmed)
            session.screening.most = self.policy.plan.held
        self._note_lookup(item, commit, beside)
        if not beside:
            self._note_own_round(item, commit, since, seen, alternative)
        pace.next_round = self.policy.plan_of(pace, len(session.tokens), session.announces)

    def _note_lookup(self, item: VerifyRound, commit: Commit, beside: bool) -> None:
        """Take note of what prompt lookup had found, or would have. beside: whether it guessed before a draft."""
        session, guess = item.session, item.session.first_guess
        if guess is None:
            return
        judged = guess.judge(commit.at.base + commit.confirmed, commit.tokens[commit.confirmed :])
        if beside and commit.drafted:  # else a held token before the guess was rejected
            guess.note(commit.drafted, commit.accepted, len(session.tokens))
        if judged is not None:
            self.policy.gains.note_lookup(judged, guess.copies, commit.accepted + 1)

    def _note_own_round(
        self, item: VerifyRound, commit: Commit, since: float | None, seen: StepSeen, alternative: bool
    ) -> None:
        """Take note of a round that was made as the policy has it. since: when the round before was committed; None:
        something else ran since.
        """
        pace = item.session.pace
        drafted = 0 if item.is_guessed else len(item.proposed if item.proposal is None else item.proposal.tokens)
        if since is not None and not seen.disturbed and drafted == pace.last_gamma:
            verified = Verified.SCREENS if item.screens else Verified.CONFIRMS if item.held else seen.kind.verified
            seen.took[verified].append(seen.now - since)
        pace.last_gamma = drafted
        if drafted and commit.confirmed >= commit.screened:
            seen.drafting = max(seen.drafting, commit.figures.draft_seconds)
            self._note_proposed(item, drafted, commit, alternative)

    def _note_proposed(self, item: VerifyRound, drafted: int, commit: Commit, alternative: bool) -> None:
        policy, pace = self.policy, item.session.pace
        judged, accepted = len(item.proposed), max(0, commit.accepted - alternative)
        if accepted < judged:
            policy.gains.note_alternative(drafted, accepted, alternative)
        is_own = item.drafting_cost > 0
        if is_own or item.proposal is not None:
            policy.note_round(pace, drafted, accepted, drafted - judged)
        else:
            pace.acceptance.note(drafted, accepted)
        # Sessions that draft for themselves decide together: one that paused would take part in their steps, for a
        # token each.
        if not self._imposed and not (is_own and policy.options.adaptive):
            policy.pause_if_useless(pace, drafted, len(item.session.tokens), item.drafting_cost)

    def finish(self, seen: StepSeen) -> None:
        """Take note that all rounds of a step are committed."""
        measured: tuple[Measured, ...] = ()
        if seen.is_typical:
            measured = tuple(
                Measured(seen.kind._replace(verified=verified), sum(took) / len(took), len(took))
                for verified, took in seen.took.items()
                if sum(took) > 0
            )
        if measured and seen.drafting and seen.kind.proposer is Proposer.DRAFT:
            # Of what the draft took, the part counts that was not beside the target's step.
            drafting = min(seen.drafting, max(0.0, measured[0].seconds - seen.seconds))
            self.policy.costs.sizes.note_drafting(drafting, seen.seconds, seen.kind, seen.load)
        if seen.load.sessions:
            self.policy.note_step(Ended(seen.now, seen.rounds, seen.load, measured))

    def _load(self, everyone: bool = False) -> Load:
        """Return the load by the sessions that generate, or by all that run."""
        sessions = tokens = announcing = screened = pausing = skipped = skippable = undrafted = away = guessing = 0
        expected = 0.0
        kv = self._runner.kv
        for session in self._sessions.values():
            screened += session.screening is not None
            if session.unread > 0 and not everyone:
                continue
            length = len(session.tokens)
            sessions += 1
            tokens += length
            announcing += length if session.announces else 0
            pausing += session.pace.pause.lasts(length)
            guessing += session.first_guess is not None
            not_read = self._speculation.skipped_by_draft(session.asked.prompt_tokens, announces=False)
            own_skipped = 0 if session.reading.is_announced else not_read
            skipped += own_skipped
            skippable += not_read
            if session.draft.peer is None:
                found = max(0, session.asked.prompt_tokens - session.unread - session.pace.prompt_tokens)
                # What the target has found it may have drafted for.
                known = found if self.policy.plan.drafted else 0
                undrafted += length - max(known, own_skipped)
                expected += self._expected(session, found)
            away += 0 if kv.is_resident(session.kv) else length
        return Load(
            sessions=sessions,
            tokens=tokens,
            announcing=announcing,
            screened=min(screened, sessions),
            pausing=pausing,
            skipped=skipped,
            skippable=skippable,
            undrafted=undrafted,
            expected=expected,
            away=away,
            guessing=guessing,
        )

    def _expected(self, session: TargetSession, found: int) -> float:
        """Return how many tokens a session may be expected to generate, with a next turn if it has had one before.

        found: tokens of its prompt whose KV was there.
        """
        typical, length = self.policy.gains.reading.typical_answer, len(session.tokens)
        left = min(session.asked.max_length - length, max(typical, length - session.asked.prompt_tokens))
        return max(1.0, left) + (typical if 2 * found > session.asked.prompt_tokens else 0.0)


def _kind_of(step: VerifyStep) -> RoundKind:
    """Return how most rounds of a step were made. The sessions share it: what one reads costs the others as well."""
    counts = Counter(
        0 if item.is_guessed else len(item.proposed if item.proposal is None else item.proposal.tokens)
        for item in step.rounds
    )
    gamma = max(counts, key=counts.__getitem__, default=0)
    if not gamma:
        return RoundKind(Proposer.NOBODY, 0, Verified.DENSE)
    proposer, verified = max(item.proposer for item in step.rounds), Verified.DENSE
    for item in step.rounds:
        read = item.input.read
        if item.screens:
            verified = Verified.SCREENS
        elif item.held and verified is not Verified.SCREENS:
            verified = Verified.CONFIRMS
        elif verified is Verified.DENSE and read is not None and not read.reads_all and not read.drafts:
            verified = Verified.SPARSE
    return RoundKind(proposer, gamma, verified)


def policy_of(target: Target) -> Policy:
    """Return the policy of a target, by its settings."""
    runner, plan, settings = target.runner, target.plan, target.settings
    most, hold = settings.most_drafted, settings.chosen.hold
    proposer = Proposer.SELF if settings.drafts_for_itself else Proposer.DRAFT
    proposed = tuple(gammas(most)) if settings.adaptive else (most,)
    adaptive = settings.adaptive or settings.draft == "auto"
    if settings.draft == "lookup":  # costs nothing where the text proposes nothing
        proposer, proposed, adaptive = Proposer.LOOKUP, (most,), False
    elif settings.draft == "none" and adaptive:
        proposer, proposed = Proposer.NOBODY, ()
    holds = (hold,) if hold is not None else (0, *range(most + 1, settings.most_held, 2), settings.most_held)
    sizes = Sizes(
        runner.weight_tokens,
        plan.budget,
        plan.least_tokens,
        dense_layers=1 - len(plan.sparse_layers) / plan.target_layers,
        own_share=settings.self_read_share,
        screening_weights=0.5 if settings.screens_lightly else 1.0,
        drafting_weights=0.5 if settings.speculation.draft_quantization == "fp8" else 1.0,
        read_share=cache(runner.read_share),
    )
    options = Options(proposer, proposed, adaptive, announced=True, holds=holds, guesses=bool(settings.chosen.lookup))
    prior = plan.acceptance if proposer is Proposer.DRAFT else None
    return Policy(options, CostTable(sizes), target.counters, runner.alternatives_beside, prior)
