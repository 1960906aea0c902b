"""How many screened tokens of a session to hold before a dense pass confirms them (target_service.screening).

A dense pass costs what sparse attention leaves out, once for all tokens that are held: the more, the cheaper a token.
But behind one that it rejects all are lost, and their rounds with them. So the best length follows from how many tokens
are confirmed, and from what steps of each kind take: as many tokens of KV as can be read meanwhile, by their sizes, and
corrected by what they were seen to take. All sessions hold as many, since the sessions of a step confirm together. Over
KV in tiers most of a dense pass is what comes over the link, of which steps that screen need little: how much each kind
brings is seen as well.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from specahead.config import TargetSettings
from specahead.kernels.linear import MOST_ROWS
from target_service.round_costs import Load, sessions_of
from target_service.self_drafting import BEYOND_BYTES, LINK

LIKELY = 0.985  # of the screened tokens: confirmed, before any has been judged (0.989: docs/quality.md)
NEWEST_TOKEN = 1 / 128  # weight of the newest judged one, once more are known,
ASSUMED_TOKENS = 16  # as so many of which counts what is assumed
# Of what has been seen, in a round of all sessions that hold nothing: so it is tried again. Of what was seen to be
# confirmed in one of each.
FORGOTTEN = 1 / 2048
NEWEST_ROUND = 1 / 64  # weight of the newest round of all sessions
DEAREST = 4.0  # steps that drafting takes: more is counted as this (a graph that is captured)
GAIN = 0.02  # by which screening must be faster than going without


class StepKind(Enum):
    """What a step does that judges drafted tokens: hold what it accepts, confirm what is held besides, or neither."""

    SCREENS = "screens"
    CONFIRMS = "confirms"
    DENSE = "dense"


# Of what sizes say, that a step takes beside those of other kinds (docs/performance.md, "Three levels"), and as so many
# rounds of which that counts.
ASSUMED, ASSUMED_ROUNDS = {StepKind.SCREENS: 1.0, StepKind.CONFIRMS: 1.2, StepKind.DENSE: 1.0}, 16


class StepReads(NamedTuple):
    """Tokens of KV of a step's sessions: all, those that it reads, and those of them that come from the host."""

    tokens: float
    read: float
    fetched: float = 0.0


@dataclass
class _Mean:
    """A mean of the newest rounds. rounds: as how many it counts."""

    value: float = 0.0
    rounds: float = 0.0

    def add(self, value: float) -> None:
        self.rounds = min(self.rounds + 1, 1 / NEWEST_ROUND)
        self.value += (value - self.value) / self.rounds

    def beside(self, assumed: float, lasts: bool = True) -> float:
        """Return the mean of what was seen and of what is assumed, which counts less with each round that was seen
        unless it `lasts`.
        """
        counts = ASSUMED_ROUNDS if lasts else max(0.0, ASSUMED_ROUNDS - self.rounds)
        return (counts * assumed + self.rounds * self.value) / (counts + self.rounds)


def _of_each_kind() -> dict[StepKind, _Mean]:
    return {kind: _Mean() for kind in StepKind}


@dataclass
class ConfirmLengths:
    """The costs by which lengths are chosen.

    gamma: drafted tokens of a round. most: tokens that may be held. share: of the KV, that screening reads.
    weight_tokens: tokens of KV that take as long to read as the weights do. screening_weights: the share of the
    weights' bytes that a step reads which screens up to MOST_ROWS tokens. present: tokens that sessions are to hold
    now. chance: of a held token to be confirmed. judged: how many were. drafting: what a round takes before the
    target's step, in seconds. committed: tokens of a round. seconds: by load, of each token of KV that steps of a kind
    seem to read. fetched: by load, the share of their KV that rounds of a kind bring from the host.
    """

    gamma: int
    most: int
    share: float
    weight_tokens: float
    screening_weights: float = 1.0
    present: int = 0
    chance: float = LIKELY
    judged: int = 0
    drafting: _Mean = field(default_factory=_Mean)
    committed: _Mean = field(default_factory=_Mean)
    seconds: dict[Load, dict[StepKind, _Mean]] = field(default_factory=lambda: defaultdict(_of_each_kind))
    fetched: dict[Load, dict[StepKind, _Mean]] = field(default_factory=lambda: defaultdict(_of_each_kind))

    def step_size(self, load: Load, kind: StepKind, reads: StepReads) -> float:
        """Return how many tokens of KV can be read from the GPU's own memory while a step runs that reads so."""
        is_light = kind is StepKind.SCREENS and sessions_of(load) * (self.gamma + 1) <= MOST_ROWS
        weights = self.weight_tokens * (self.screening_weights if is_light else 1.0)
        return weights + reads.read + LINK * reads.fetched + BEYOND_BYTES * (self.weight_tokens + reads.tokens)

    def note_round(
        self,
        load: Load,
        kind: StepKind,
        reads: StepReads,
        seconds: float,
        drafting: float,
        committed: int,
        fetched: float = 0.0,
    ) -> None:
        """Take note of a session's round, in a step that read so: seconds of the step, and of what went by before it
        for the draft; tokens that the session committed or held; the share of its KV that was fetched. While nothing is
        held, what was seen of other steps is forgotten, so that they are tried again.
        """
        seconds, here, fetched_here = max(1e-6, seconds), self.seconds[load], self.fetched[load]
        here[kind].add(seconds / self.step_size(load, kind, reads))
        fetched_here[kind].add(fetched)
        for other in (StepKind.SCREENS, StepKind.CONFIRMS) if not self.present else ():
            for seen in (here[other], fetched_here[other]):
                seen.rounds *= 1 - FORGOTTEN / sessions_of(load)
        self.drafting.add(min(DEAREST * seconds, drafting))
        self.committed.add(committed)

    def note_held(self, held: int, confirmed: int) -> None:
        """Take note of a session's round that was to confirm so many tokens, and confirmed so many of them. What was
        seen is forgotten while sessions hold nothing.
        """
        judged = min(held, confirmed + 1)
        if judged:
            weight = max(NEWEST_TOKEN, 1 / (ASSUMED_TOKENS + self.judged))
            self.chance += (1 - (1 - weight) ** judged) * (confirmed / judged - self.chance)
            self.judged += judged
        elif not self.present:
            self.chance += FORGOTTEN * max(0.0, LIKELY - self.chance)

    def choose(self, load: Load, tokens: int) -> None:
        """Say how many tokens sessions are to hold now, at most; 0: none, until it is known what dense steps take.

        tokens: of KV, of the sessions of a step.
        """
        if self.seconds[load][StepKind.DENSE].rounds < ASSUMED_ROUNDS:
            self.present = 0
            return
        rates = {most: self._rate(load, most, tokens) for most in (0, *range(self.gamma + 1, self.most + 1))}
        best = max(rates, key=rates.__getitem__)
        self.present = best if rates[best] > (1 + GAIN) * rates[0] else 0

    def _rate(self, load: Load, most: int, tokens: int) -> float:
        """Return the tokens that a session gets for what all steps take from one dense pass to the next.

        A round of the draft that was made for what is taken back is lost with it.
        """
        a_round = max(1.0, self.committed.value)
        held = max(a_round, most - self.gamma / 2) if most else 0.0
        kept = self.chance**held
        gained = kept * a_round + sum(self.chance**i for i in range(round(held)))
        rounds = held / a_round + (1 - kept)
        screens = self.drafting.value + self._step_seconds(load, StepKind.SCREENS, tokens)
        confirms = self._step_seconds(load, StepKind.CONFIRMS if most else StepKind.DENSE, tokens)
        return gained / (rounds * screens + self.drafting.value + confirms)

    def _step_seconds(self, load: Load, kind: StepKind, tokens: int) -> float:
        """Return what a step takes. As large a part of what it reads is assumed to be fetched as of all that a dense
        step reads.
        """
        share = self.share if kind is StepKind.SCREENS else 1.0
        here, fetched = self.seconds[load], self.fetched[load]
        a_token = here[kind].beside(ASSUMED[kind] * here[StepKind.DENSE].value)
        brought = fetched[kind].beside(share * fetched[StepKind.DENSE].value, lasts=False)
        return a_token * self.step_size(load, kind, StepReads(tokens, share * tokens, brought * tokens))


def confirm_lengths(settings: TargetSettings, weight_tokens: float) -> ConfirmLengths | None:
    """Return how a target chooses lengths; None: they are given."""
    if settings.chosen.hold is not None:
        return None
    most, light = settings.most_held, 0.5 if settings.screens_lightly else 1.0
    return ConfirmLengths(settings.most_drafted, most, settings.self_read_share, weight_tokens, light)
