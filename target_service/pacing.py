"""What each step took, and how by that the sessions' next rounds are made: what the controller is told, and when."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from specahead.config import TargetSettings
from specahead.engine.steps.runner import Runner
from specahead.wire.messages import Commit
from target_service.confirm_lengths import StepKind, StepReads, confirm_lengths
from target_service.controller import UNDECIDED, Controller, RoundSeen
from target_service.planning import VerifyRound, VerifyStep
from target_service.round_costs import Choice, Load
from target_service.self_drafting import SelfDrafting
from target_service.session import TargetSession


class StepSeen(NamedTuple):
    """What is known of a step that has ended.

    now: the time. load: the sessions that generate. size: about how long a step takes that reads everything for one
    that reads the weights alone. kinds: how the sessions' last rounds were made. disturbed: whether something else than
    rounds took time in it or before (prompts, or a graph that was captured). alone: whether it took the time of rounds
    alone. reads: what it read of KV.
    """

    now: float
    load: Load
    size: float
    kinds: Counter[Choice]
    disturbed: bool
    alone: bool
    reads: StepReads


class Pacing:
    """Has the controller decide over the rounds of the sessions that run, by name, and how many tokens each holds.

    drafting: how sessions draft for themselves, if they do. imposed: whether a benchmark imposes the verdicts.
    """

    def __init__(
        self,
        runner: Runner,
        settings: TargetSettings,
        sessions: Mapping[str, TargetSession],
        drafting: SelfDrafting | None,
        counters: Counter[str],
        imposed: bool = False,
    ) -> None:
        adaptive = settings.adaptive and settings.has_draft
        self.controller = Controller(settings.most_drafted, adaptive, counters, runner.alternatives_beside)
        self._runner, self._settings, self._sessions, self._drafting = runner, settings, sessions, drafting
        self._lengths = confirm_lengths(settings, runner.weight_tokens)
        self._captures_seen, self._imposed = 0, imposed
        self._draft_has_read = False  # in this process, prompts, since the last step
        self._read_last = False  # in the last step, parts of prompts, which may have run on behind it

    def begin(self, session: TargetSession) -> None:
        """Say how a session's first round is made, unless it has had one before it gave way."""
        if self._lengths is not None and session.screening is not None:
            session.screening.most = self._lengths.present
        if session.pace is UNDECIDED:
            tokens = len(session.tokens)
            session.pace = self.controller.first_pace(tokens, session.announces)
            session.next_round = self.controller.effective(session.pace, tokens)

    def note_draft_reading(self, seconds: float) -> None:
        """Take note that the draft in this process has read prompts for so long, on the same device."""
        self._draft_has_read = True
        self.controller.note_reading(seconds / self._load()[1])

    def see(self, step: VerifyStep, fetched: int, now: float) -> StepSeen:
        """Return what is known of a step that has ended at the time `now`; to be called once. fetched: (layer, KV head,
        token) triples that its rounds have brought from the host.
        """
        load, size = self._load()
        kinds = Counter(session.pace.kind for session in self._sessions.values() if session.pace.kind)
        tokens = [len(item.session.tokens) for item in step.rounds]
        shares = (self._settings.self_read_share if item.screens else 1.0 for item in step.rounds)
        read = sum(share * count for share, count in zip(shares, tokens, strict=True))
        captured = self._runner.captures_made != self._captures_seen
        disturbed = self._draft_has_read or bool(step.prefills) or captured
        alone = not disturbed and not self._read_last
        self._draft_has_read, self._captures_seen = False, self._runner.captures_made
        self._read_last = bool(step.prefills)
        if self._lengths is not None and alone:
            self._lengths.choose(load, sum(tokens))
        reads = StepReads(sum(tokens), read, fetched / self._triples)
        return StepSeen(now, load, size, kinds, disturbed, alone, reads)

    @property
    def _triples(self) -> int:
        """How many (layer, KV head, token) triples a token of KV is."""
        return self._runner.kv.num_layers * self._runner.kv.kv_heads

    def _load(self) -> tuple[Load, float]:
        """Return the load by the sessions that generate, and its size, as StepSeen has them."""
        generating = [len(session.tokens) for session in self._sessions.values() if session.unread <= 0]
        size = 1 + sum(generating) / self._runner.weight_tokens if self._runner.weight_tokens else 1.0
        return (len(generating).bit_length(), sum(generating).bit_length()), size

    def choose_length(self, item: VerifyRound, commit: Commit, seen: StepSeen) -> None:
        """Say how many tokens a session holds, by what its steps take."""
        screening, lengths = item.session.screening, self._lengths
        if lengths is None or screening is None:
            return
        if not item.screens:
            lengths.note_held(commit.screened, commit.confirmed)
            screening.most = lengths.present
        if seen.alone and commit.drafted and not item.is_guessed:
            drafting = commit.draft_seconds if self._settings.draft_in_target else commit.wait_seconds
            kind = StepKind.SCREENS if item.screens else StepKind.CONFIRMS if item.held else StepKind.DENSE
            fetched = commit.kv_tokens_fetched / self._triples / len(item.session.tokens)
            took = commit.verify_seconds, drafting
            lengths.note_round(seen.load, kind, seen.reads, *took, commit.accepted + 1, fetched)

    def decide(self, item: VerifyRound, commit: Commit, seen: StepSeen, alternative: bool) -> None:
        """Have the controller say how a session's next round is made, by the one that was committed just now.

        alternative: whether the last accepted token is one.
        """
        # Sessions that draft for themselves decide together (SelfDrafting): one that paused would take part in their
        # steps, for a token each. Imposed verdicts say nothing about who proposed, but auto is measured by them.
        together = self._drafting is not None and self._drafting.adaptive and item.drafting_cost > 0
        fixed = self._imposed and not self._settings.adaptive
        if fixed or together or commit.confirmed < commit.screened:
            return
        session, before = item.session, item.session.committed_at
        if item.is_guessed:  # which says nothing about the draft
            session.committed_at = None
            return
        session.committed_at = None if seen.disturbed else seen.now
        announces = session.announces
        if not item.proposed and self.controller.goes_on_resting(session.pace, announces):
            session.pace = session.pace.paused_with_all(len(session.tokens))
            return
        drafted = item.proposed if item.proposal is None else item.proposal.tokens
        told = RoundSeen(
            kind=Choice(len(drafted), announces and item.input.read is not None),
            accepted=commit.accepted,
            committed=len(session.tokens),
            seconds=(seen.now - before) / seen.size if before is not None and not seen.disturbed else None,
            drafting=commit.draft_seconds / seen.size,
            step=commit.verify_seconds / seen.size,
            announces=announces,
            cost=item.drafting_cost,
            alternative=alternative,
            left_out=len(drafted) - len(item.proposed),
        )
        session.pace = self.controller.after_round(session.pace, told, seen.load, seen.kinds)
        session.next_round = self.controller.effective(session.pace, told.committed)
