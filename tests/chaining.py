"""What lets a scripted model's steps run behind its draft's rounds, without a device: all runs at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.inputs import SequenceInput, SequenceOutput
from engine.passes.outputs import StepUnderWay
from engine.rounds.requests import RoundOutput, RoundRequest
from engine.rounds.under_way import RoundsUnderWay
from engine.runner import Runner
from engine.sampling import Support


class StepAtOnce(StepUnderWay):
    def __init__(self, given: list[SequenceOutput]) -> None:
        self._given = given

    def outputs(self) -> list[SequenceOutput]:
        return self._given


@dataclass(frozen=True)
class RoundsAtOnce(RoundsUnderWay):
    given: list[RoundOutput] = field(default_factory=list)

    def outputs(self) -> list[RoundOutput]:
        return self.given

    @property
    def of_one_branch(self) -> bool:
        return all(len(output.branches) == 1 for output in self.given)


class ChainingRunner(Runner):
    """Launches by the `forward` and `draft_rounds` that a model has. It chains where `chains` is set."""

    _left_rounds: Sequence[RoundOutput] = ()

    def make_room_for_rounds(self, sequences: int, gamma: int, support: int, rows: int, block_size: int) -> None:
        pass

    def launch_rounds(self, requests: list[RoundRequest]) -> RoundsUnderWay:
        return RoundsAtOnce([], self.draft_rounds(requests))

    def take_rounds(self, rounds: RoundsUnderWay) -> None:
        self._left_rounds = rounds.outputs()

    def launch(self, inputs: list[SequenceInput]) -> StepUnderWay:
        if all(item.behind is None for item in inputs):
            return super().launch(inputs)
        return StepAtOnce(self.forward([self._known(item) for item in inputs]))

    def _known(self, item: SequenceInput) -> SequenceInput:
        if item.behind is None:
            return item
        assert item.drafted is not None
        (left,) = self._left_rounds[item.behind].branches
        count = len(item.drafted.tokens)
        supports = []
        if left.ids is not None and left.probs is not None:
            supports = [Support(ids, probs) for ids, probs in zip(left.ids[:count], left.probs[:count], strict=True)]
        tokens = left.tokens[:count]
        drafted = replace(item.drafted, tokens=tokens, supports=supports)
        read, bitmap = item.read, self._left_rounds[item.behind].bitmap
        if read is not None:
            assert read.budget is not None and bitmap is not None and not read.budget.bitmap.any()
            words = read.budget.bitmap.shape[1]
            read = replace(read, budget=replace(read.budget, bitmap=bitmap[:, :words]))
        return replace(item, tokens=[item.tokens[0], *tokens], read=read, drafted=drafted, behind=None)
