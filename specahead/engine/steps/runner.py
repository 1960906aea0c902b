"""What the services need of a model. Tests and benchmarks may stand in another."""

from collections.abc import Sequence

from specahead.engine.kv.cache import KVCache
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.passes.outputs import StepUnderWay
from specahead.engine.steps.rounds.behind_steps import Imposed, Verdict
from specahead.engine.steps.rounds.requests import RoundOutput, RoundRequest, RoundSettings
from specahead.engine.steps.rounds.under_way import RoundsUnderWay

WARM_SESSIONS = 8  # steps of up to so many sessions are made ready before the first request, the others behind it
COMPILED_SESSIONS = 32  # of up to so many, their kernels are compiled before it, so that capturing them is short


class Runner:
    """Runs a model over paged KV. One call is one step; the caller decides what is in it.

    vocab_size: token ids that there are. deterministic: whether what a sequence gives depends on nothing that runs
    beside it. weight_tokens: tokens of KV that take as much memory as the weights. goes_ahead: whether it pays to
    launch a step that needs no draft before the host has seen the one before (`launch`). chains: whether rounds can be
    launched (`launch_rounds`), steps behind them (`take_rounds`), and rounds behind these (`take_verdicts`).
    captures_made: CUDA graphs that runners of this process have captured; a step beside says little of what steps take.
    unprepared: kinds of steps that `warm_up_more` is still to make ready for.
    """

    kv: KVCache
    vocab_size: int
    deterministic = False
    weight_tokens = 0.0
    goes_ahead = False
    chains = False
    captures_made = 0
    unprepared = 0

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Run all inputs, write their KV and advance their lengths. Returns outputs in input order.

        Raises OutOfPages before anything has changed.
        """
        raise NotImplementedError

    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Verdict] | None = None) -> StepUnderWay:
        """Launch a step in which each sequence decodes one token plainly, or each drafts as many by itself, without
        waiting for it: its KV is written and lengths advance, its verdicts come later.

        It may go on behind what the step launched last leaves (SequenceInput.follows); at most two steps are under
        way. imposed: verdicts that count in place of that step's. A step may also judge what a draft's rounds leave
        (SequenceInput.behind); then it is the only one under way. Raises OutOfPages before anything has changed.
        """
        raise NotImplementedError(f"{type(self).__name__} waits for each step")

    def make_room_for_rounds(self, sequences: int, gamma: int, support: int, rows: int, block_size: int) -> None:
        """Have room for what rounds of a draft on the same device leave, of so many sequences, before `warm_up`.

        gamma: tokens of a round, at most. support: entries of the distribution that each is drawn from, at most. rows,
        block_size: of an announcement.
        """
        raise NotImplementedError(f"{type(self).__name__} runs no steps behind rounds")

    def alternatives_beside(self, gamma: int) -> int:
        """Return how many alternatives run beside γ drafted tokens in a step behind rounds, at next to no cost."""
        return 0

    def take_rounds(self, rounds: RoundsUnderWay) -> None:
        """Have the next step that is launched judge what these rounds of one branch leave, without waiting for them."""
        raise NotImplementedError(f"{type(self).__name__} runs no steps behind rounds")

    def warm_up(
        self,
        reads: list[SparseRead | None],
        sequences: int,
        gammas: Sequence[int] = (),
        screened: Sequence[SparseRead | None] = (),
        lightly: bool = False,
    ) -> None:
        """Make ready for steps that read so, of up to so many sequences: now for up to WARM_SESSIONS of them, for more,
        and for what few requests ask for, by `warm_up_more`. There may be nothing to do.

        gammas: the numbers of tokens that steps may draft by themselves. screened: what steps read whose tokens a later
        pass judges. lightly: whether these may run by weights of their own (SequenceInput.light).
        """

    def warm_up_more(self) -> None:
        """Make ready for one more kind of step of those that are `unprepared`, which takes some tenths of a second."""

    def warm_up_prompts(self, tokens: int) -> None:
        """Make ready for prompts of which so many tokens are read at once. There may be nothing to do."""

    def check_sparse_prompts(self) -> None:
        """Raise ValueError if this runner reads no prompts sparsely."""

    def keep_memories(self, sequences: int) -> None:
        """Have room to share out the budgets of so many sequences, before the first step that does."""

    def warm_up_rounds(self, sequences: int, methods: Sequence[str], gammas: Sequence[int] = ()) -> None:
        """Make ready for rounds of up to so many sessions that announce by these methods, once rounds are prepared: as
        `warm_up` does.

        gammas: the numbers of tokens that rounds may draft where they draft fewer than all; made ready later.
        """

    def prepare_rounds(self, settings: RoundSettings) -> None:
        """Say how rounds are drafted, before the first `draft_rounds`."""
        raise NotImplementedError(f"{type(self).__name__} drafts nothing")

    def launch_rounds(self, requests: list[RoundRequest]) -> RoundsUnderWay:
        """Launch `draft_rounds` without waiting for them. Raises OutOfPages."""
        raise NotImplementedError(f"{type(self).__name__} waits for its rounds")

    def make_room_for_verdicts(self, sequences: int) -> None:
        """Have room for the verdicts that a step of a target on the same device leaves, of so many sequences, once
        rounds are prepared and before `warm_up_rounds`.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts no rounds behind steps")

    def take_verdicts(self, step: StepUnderWay, held: Sequence[int], imposed: Sequence[Imposed] | None = None) -> None:
        """Have the next rounds that are launched go on behind this step, without waiting for it (RoundRequest.behind).

        held: of each sequence of the step, the tokens that it judges before those of the last round. imposed: verdicts
        that count in place of the step's.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts no rounds behind steps")

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        """Draft a whole round of each; the lengths of their KV are left to the caller. Raises OutOfPages."""
        raise NotImplementedError(f"{type(self).__name__} drafts nothing")
