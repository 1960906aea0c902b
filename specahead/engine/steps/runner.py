"""What the services need of a model: one interface for a target's, one for a draft's. Tests may stand in another."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specahead.engine.kv.cache import KVCache
from specahead.engine.steps.device_chain import DeviceChain, Imposed
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.outputs import RoundsUnderWay, StepUnderWay
from specahead.engine.steps.requests import RoundOutput, RoundRequest, RoundSettings

WARM_SESSIONS = 8  # steps of up to 8 sessions are made ready before the first request, others after it
COMPILED_SESSIONS = 32  # the kernels of steps of up to 32 sessions are compiled before it, so that capturing is short


class Runner(ABC):
    """Runs a model over paged KV. One call is one step; the caller decides what is in it."""

    kv: KVCache
    vocab_size: int
    """Token ids that there are."""
    deterministic = False
    """Whether what a sequence gives depends on nothing that runs beside it."""
    chains_rounds = False
    """Whether rounds, steps that judge them, and rounds that follow these steps form a device chain."""
    captures_made = 0
    """CUDA graphs that runners of this process have captured; a step beside says little of what steps take."""
    leaves_states = False
    """Whether passes leave the states of their tokens, which a head on the same device reads."""
    reads_states = False
    """Whether the model is such a head: its sequences name those of the target (SequenceKV.target)."""
    unprepared = 0
    """Kinds of steps that `warm_up_more` is still to make ready for."""

    @abstractmethod
    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Run all inputs, write their KV and advance their lengths. Returns outputs in input order.

        Raises OutOfPages before anything has changed.
        """

    def warm_up_prompts(self, tokens: int) -> None:
        """Make ready for prompts that are read up to `tokens` tokens at once. There may be nothing to do."""
        return

    def warm_up_more(self) -> None:
        """Make ready for one more of the `unprepared` kinds of steps, which takes some tenths of a second."""
        return


class TargetRunner(Runner):
    """Runs the steps of a target."""

    weight_tokens = 0.0
    """Tokens of KV that take as much memory as the weights."""
    chains_steps = False
    """Whether it pays to launch a step that needs no draft before the host has seen the one before."""

    def read_share(self, rows: int) -> float:
        """Return the share of the weights that a pass of so many tokens reads: less than 1 of a mixture of experts."""
        return 1.0

    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Imposed] | None = None) -> StepUnderWay:
        """Launch a step in which each sequence decodes one token plainly, or each drafts as many by itself, without
        waiting for it: its KV is written and lengths advance, its verdicts come later.

        It may follow the step launched last (SequenceInput.follows); at most two steps are under way. A step may also
        judge what a draft's rounds leave (SequenceInput.draft_row); then it is the only one under way. imposed:
        verdicts that count in place of the last step's. Raises OutOfPages before anything has changed.
        """
        outputs = self.forward(inputs)
        return lambda: outputs

    def make_chain(self, sequences: int, gamma: int, support: int, rows: int, block_size: int) -> DeviceChain | None:
        """Have steps judge what rounds of a draft on the same device leave, from before `warm_up` on. Returns the chain
        that the draft's runner is to join; None if it needs none.

        sequences: of a step, at most. gamma: tokens of a round, at most. support: entries of the distribution that each
        is drawn from, at most. rows, block_size: of an announcement.
        """
        return None

    def alternatives_beside(self, gamma: int) -> int:
        """Return how many alternatives run beside γ drafted tokens in a step that judges rounds, at next to no cost."""
        return 0

    def warm_up(
        self,
        reads: list[SparseRead | None],
        sequences: int,
        gammas: Sequence[int] = (),
        screened: Sequence[SparseRead | None] = (),
        lightly: bool = False,
    ) -> None:
        """Make ready for steps of up to `sequences` sequences: for up to WARM_SESSIONS of them now, for more, and for
        steps that few requests need, by `warm_up_more`. There may be nothing to do.

        reads: the reads of steps; None: everything. gammas: the numbers of tokens that steps may draft by themselves.
        screened: the reads of steps whose tokens a later pass judges. lightly: whether these may run by weights of
        their own (SequenceInput.light).
        """
        return

    def keep_memories(self, sequences: int) -> None:
        """Make room to share out the budgets of up to `sequences` sequences, before the first step that does."""
        return


class DraftRunner(Runner):
    """Drafts rounds."""

    @abstractmethod
    def prepare_rounds(self, settings: RoundSettings) -> None:
        """Set how rounds are drafted, before the first `draft_rounds`."""

    @abstractmethod
    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        """Draft a whole round of each; the lengths of their KV are left to the caller. Raises OutOfPages."""

    def launch_rounds(self, requests: list[RoundRequest], imposed: Sequence[Imposed] | None = None) -> RoundsUnderWay:
        """Launch `draft_rounds` without waiting for them. Raises OutOfPages.

        They may follow the step that the target of the chain has launched last (RoundRequest.follows). imposed:
        verdicts that count in place of that step's, on the tokens of the round before alone.
        """
        return RoundsUnderWay.finished(self.draft_rounds(requests))

    def join_chain(self, chain: DeviceChain | None) -> None:
        """Have rounds follow the steps of a target on the same device, whose `make_chain` returned this, once rounds
        are prepared and before `warm_up_rounds`.
        """
        return

    def warm_up_rounds(self, sequences: int, announces: bool, gammas: Sequence[int] = ()) -> None:
        """Make ready for rounds of up to `sequences` sessions, once rounds are prepared, as `warm_up` does.

        announces: whether rounds may announce blocks. gammas: the numbers of tokens that rounds may draft where they
        draft fewer than all; made ready later.
        """
        return


class TargetOrDraftRunner(TargetRunner, DraftRunner):
    """Runs a model as a target or as a draft."""
