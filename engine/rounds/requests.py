"""How rounds are drafted, what is asked of one, and what it gives. Knows no tensors of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.announcing import Announcer
from engine.kv.pages import SequenceKV


@dataclass(frozen=True)
class RoundSettings:
    """How all rounds of a runner are drafted.

    gamma: tokens of a round. support: entries of a sampled token's distribution that are kept. block_size: tokens of a
    block. read_share: share of the blocks that later passes read; 1: they are dense. sink_blocks, window_blocks: always
    read by them. announcers: by the name of a method, how it announces. refresh_every: rounds from one dense first
    pass of a session to its next, at most; 1: every round has one.
    """

    gamma: int
    support: int
    block_size: int
    read_share: float = 1.0
    sink_blocks: int = 1
    window_blocks: int = 4
    announcers: Mapping[str, Announcer] = field(default_factory=dict)
    refresh_every: int = 1

    def __post_init__(self) -> None:
        if self.refresh_every < 1:
            raise ValueError(
                f"refresh_every is {self.refresh_every}, expected at least 1 (1: every round is refreshed)"
            )
        if self.refresh_every > 1 and self.read_share >= 1:
            raise ValueError(
                f"refresh_every is {self.refresh_every} and read_share {self.read_share}: rounds without a dense first "
                "pass read lists; give a read_share below 1, or refresh_every 1"
            )

    def to(self, device: torch.device) -> "RoundSettings":
        """Return the same settings with their tensors on a device."""
        return replace(self, announcers={name: each.to(device) for name, each in self.announcers.items()})


@dataclass
class RoundMemory:
    """What the last dense first pass of one session weighed, where not every round refreshes. The runner fills it.

    weights: [layers, heads, blocks] float32 where the model lives, over γ + 1 as they count in evidence. length: tokens
    that they are of and that still stand. rounds: drafted since that one.
    """

    weights: Tensor | None = None
    length: int = 0
    rounds: int = 0

    def refresh_due(self, every: int) -> bool:
        """Whether the next round is one of those, `every` rounds apart, that refresh."""
        return self.weights is None or self.rounds + 1 >= every

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on: what comes in their place was never weighed."""
        self.length = min(self.length, length)


@dataclass(frozen=True)
class AnnouncementRequest:
    """Choose blocks by the announcer named `method`, from `first` up to `last` - 1, `count` of them (Announcer).

    before: uint64 [rows, words], what was announced last round, if it is known.
    """

    method: str
    first: int
    last: int
    count: int
    before: np.ndarray | None


@dataclass(frozen=True)
class RoundRequest:
    """A round of one session.

    tokens: pending ones, the last of them committed or guessed. temperature 0: greedy. uniforms: [γ + 1] float64.
    refresh: let the first pass be dense, and `memory` hold what it weighed; otherwise the pass reads by what `memory`
    holds. Both only count where settings.refresh_every > 1; without a memory nothing is held.
    """

    kv: SequenceKV
    tokens: list[int]
    temperature: float
    top_p: float
    uniforms: np.ndarray
    announce: AnnouncementRequest | None
    memory: RoundMemory | None = None
    refresh: bool = True

    def __post_init__(self) -> None:
        if not self.refresh and (self.memory is None or self.memory.weights is None):
            raise ValueError("a round without refresh needs a memory with weights: refresh the session's first round")


@dataclass(frozen=True)
class RoundOutput:
    """What a round gives. The KV then holds all pending tokens and γ more; kv.length is left to the caller.

    tokens: γ + 1, the last not run. ids, probs: [γ + 1, support] of each token's distribution, None if greedy. bitmap:
    uint64 [rows, words] of the blocks to announce, if asked for. blocks_read: over passes, layers and KV heads; None
    where all passes are dense.
    """

    tokens: list[int]
    ids: np.ndarray | None
    probs: np.ndarray | None
    bitmap: np.ndarray | None
    blocks_read: int | None = None
