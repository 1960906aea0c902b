"""The plans that a step's rounds may be made by, and the load that they are made under."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from specahead.wire.messages import Proposer


class Verified(Enum):
    """How a step verifies proposed tokens."""

    DENSE = "dense"  # over all KV
    SPARSE = "sparse"  # over the announced blocks
    SCREENS = "screens"  # over a small share of KV; accepted tokens are held back
    CONFIRMS = "confirms"  # over all KV, held tokens included


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How the next round of each session is made."""

    proposer: Proposer
    gamma: int = 0
    """Tokens that are proposed; 0: none."""
    sparse: bool = False
    """Whether sessions that take announcements read the announced blocks only; else they read everything."""
    held: int = 0
    """Tokens that an exact session holds back, at most, before a dense pass confirms them; 0: every pass is dense."""

    @property
    def drafted(self) -> int:
        """Tokens that a draft model proposes."""
        return self.gamma if self.proposer is Proposer.DRAFT else 0

    def __str__(self) -> str:
        if not self.gamma:
            return "plain"
        reads = ", reads announced blocks" if self.sparse else ""
        return f"{self.proposer.name.lower()}, {self.gamma} tokens{reads}{f', holds {self.held}' if self.held else ''}"


PLAIN = RoundPlan(Proposer.NOBODY)


class RoundKind(NamedTuple):
    """What a round's time depends on, beside the load. A plan that holds tokens back has rounds of two kinds."""

    proposer: Proposer
    gamma: int
    verified: Verified


@dataclass(frozen=True)
class Load:
    """The sessions that generate."""

    sessions: int
    """Sessions that generate."""
    tokens: int
    """Tokens of KV of all of them."""
    announcing: int = 0
    """Tokens of KV of the sessions that take announcements."""
    screened: int = 0
    """Sessions that may hold tokens back."""
    pausing: int = 0
    """Sessions that their draft, or they themselves, propose nothing for while it is for others."""
    skipped: int = 0
    """Tokens of these that a draft does not read."""
    skippable: int = 0
    """Tokens of these that a draft would not read if nothing were announced."""
    undrafted: int = 0
    """Tokens that a draft would have to read first of the sessions that have none now."""
    expected: float = 0.0
    """Tokens that these sessions may be expected to generate, in their next turns as well."""
    away: int = 0
    """Tokens of KV of the sessions whose KV has partly left the GPU."""
    guessing: int = 0
    """Sessions for which prompt lookup proposes where nobody else does."""

    @cached_property
    def bucket(self) -> tuple[int, int]:
        """Loads of one bucket share their figures: powers of two of sessions and of tokens."""
        return self.sessions.bit_length(), self.tokens.bit_length()


@dataclass(frozen=True)
class Options:
    """Which plans a target may choose from."""

    proposer: Proposer
    gammas: tuple[int, ...]
    """Numbers of tokens that a round may propose. A single one is given by the settings: it is always made."""
    adaptive: bool = False
    """Whether rounds may also be made plainly, or read everything where something is announced."""
    announced: bool = False
    """Whether the draft announces blocks to read."""
    holds: tuple[int, ...] = (0,)
    """Numbers of tokens that exact sessions may hold back."""
    guesses: bool = False
    """Whether prompt lookup proposes in exact sessions where nobody else does."""

    def plans(self, load: Load) -> list[RoundPlan]:
        """Return the plans that differ under a load."""
        sparse = (True, False) if self.adaptive and load.announcing else (self.announced,)
        holds = self.holds if load.screened else (0,)
        drafted = [
            RoundPlan(self.proposer, gamma, reads, held)
            for gamma in self.gammas
            for reads in sparse
            for held in holds
            if not held or held > gamma
        ]
        return [PLAIN, *drafted] if self.adaptive or not drafted else drafted
