"""What lets a scripted model's steps run behind its draft's rounds, without a device: all runs at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.inputs import SequenceInput, SequenceOutput
from engine.passes.outputs import StepUnderWay
from engine.rounds.behind_steps import Verdict
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
    _left_verdicts: Sequence[Verdict] = ()

    def make_room_for_rounds(self, sequences: int, gamma: int, support: int, rows: int, block_size: int) -> None:
        pass

    def launch_rounds(self, requests: list[RoundRequest]) -> RoundsUnderWay:
        return RoundsAtOnce([], self._draft_behind(requests) if requests[0].behind else self.draft_rounds(requests))

    def make_room_for_verdicts(self, sequences: int) -> None:
        pass

    def take_verdicts(self, step: StepUnderWay, held: Sequence[int], imposed: Sequence[Verdict] | None = None) -> None:
        outputs = step.outputs() if imposed is None else []
        left = imposed or [output.verdict for output in outputs if output.verdict is not None]
        of_each = zip(left, held, strict=True)
        self._left_verdicts = [(max(0, accepted - before), token) for (accepted, token), before in of_each]

    def _draft_behind(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        """Draft behind what the step has left, as if the host had seen it."""
        lengths, known, begins = [item.kv.length for item in requests], [], []
        for item in requests:
            assert item.behind is not None
            accepted, token = self._left_verdicts[item.behind.place]
            cut = item.behind.judged - accepted
            item.kv.length -= cut
            draws, announce = item.behind.uniforms[cut], item.behind.announce[cut]
            tokens = [item.behind.before[cut], token]
            known.append(replace(item, tokens=tokens, uniforms=draws, announce=announce, behind=None))
            begins.append((accepted, token))
        try:
            outputs = self.draft_rounds(known)
        finally:
            for item, length in zip(requests, lengths, strict=True):
                item.kv.length = length
        return [replace(output, began_behind=begun) for output, begun in zip(outputs, begins, strict=True)]

    def take_rounds(self, rounds: RoundsUnderWay) -> None:
        self._left_rounds = rounds.outputs()

    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Verdict] | None = None) -> StepUnderWay:
        if all(item.behind is None for item in inputs):
            return super().launch(inputs, imposed)
        return StepAtOnce(self.forward([self._known(item) for item in inputs]))

    def _known(self, item: SequenceInput) -> SequenceInput:
        if item.behind is None:
            return item
        assert item.drafted is not None
        (left,) = self._left_rounds[item.behind].branches
        count = len(item.drafted.tokens) - item.held
        supports = []
        if left.ids is not None and left.probs is not None:
            supports = [Support(ids, probs) for ids, probs in zip(left.ids[:count], left.probs[:count], strict=True)]
        tokens = [*item.drafted.tokens[: item.held], *left.tokens[:count]]
        drafted = replace(item.drafted, tokens=tokens, supports=supports)
        read, bitmap = item.read, self._left_rounds[item.behind].bitmap
        if read is not None and bitmap is not None:
            assert read.budget is not None and not read.budget.bitmap.any()
            words = read.budget.bitmap.shape[1]
            read = replace(read, budget=replace(read.budget, bitmap=bitmap[:, :words]))
        return replace(item, tokens=[item.tokens[0], *tokens], read=read, drafted=drafted, behind=None)
