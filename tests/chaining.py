"""What lets a scripted model's steps run behind its draft's rounds, without a device: all runs at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specahead.engine.sampling.distributions import Support
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.passes.outputs import StepUnderWay
from specahead.engine.steps.rounds.behind_steps import NO_ALTERNATIVE, Imposed, Verdict
from specahead.engine.steps.rounds.requests import RoundOutput, RoundRequest
from specahead.engine.steps.rounds.under_way import RoundsUnderWay
from specahead.engine.steps.runner import Runner


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

    beside = 0  # alternatives that run beside drafted tokens, at most
    _left_rounds: Sequence[RoundOutput] = ()
    _left_verdicts: Sequence[Imposed] = ()

    def make_room_for_rounds(self, sequences: int, gamma: int, support: int, rows: int, block_size: int) -> None:
        pass

    def launch_rounds(self, requests: list[RoundRequest]) -> RoundsUnderWay:
        return RoundsAtOnce([], self._draft_behind(requests) if requests[0].behind else self.draft_rounds(requests))

    def make_room_for_verdicts(self, sequences: int) -> None:
        pass

    def take_verdicts(self, step: StepUnderWay, held: Sequence[int], imposed: Sequence[Imposed] | None = None) -> None:
        outputs = step.outputs() if imposed is None else []
        left = imposed or [
            (*output.verdict, NO_ALTERNATIVE if output.alternative is None else output.alternative)
            for output in outputs
            if output.verdict is not None
        ]
        of_each = zip(left, held, strict=True)
        self._left_verdicts = [(max(0, accepted - before), *tokens) for (accepted, *tokens), before in of_each]

    def _draft_behind(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        """Draft behind what the step has left, as if the host had seen it."""
        lengths, known, begins = [item.kv.length for item in requests], [], []
        for item in requests:
            assert item.behind is not None
            accepted, token, alternative = self._left_verdicts[item.behind.place]
            cut = item.behind.judged - accepted
            item.kv.length -= cut
            draws, announce = item.behind.uniforms[cut], item.behind.announce[cut]
            tokens = [item.behind.before[cut] if alternative < 0 else alternative, token]
            known.append(replace(item, tokens=tokens, uniforms=draws, announce=announce, behind=None))
            begins.append(((accepted, token), alternative if alternative >= 0 else None))
        try:
            outputs = self.draft_rounds(known)
        finally:
            for item, length in zip(requests, lengths, strict=True):
                item.kv.length = length
        return [
            replace(output, began_behind=begun, alternative=alternative)
            for output, (begun, alternative) in zip(outputs, begins, strict=True)
        ]

    def alternatives_beside(self, gamma: int) -> int:
        return min(gamma, self.beside)

    def take_rounds(self, rounds: RoundsUnderWay) -> None:
        self._left_rounds = rounds.outputs()

    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Verdict] | None = None) -> StepUnderWay:
        if all(item.behind is None for item in inputs):
            return super().launch(inputs, imposed)
        known = [self._known(item) for item in inputs]
        lengths, outputs = [item.kv.length for item in inputs], self.forward(known)
        for item, of_chain, length, output in zip(inputs, known, lengths, outputs, strict=True):
            self._go_on_behind_alternative(item, of_chain, length, output)
            item.kv.length = length + item.rows
        return StepAtOnce(outputs)

    def _go_on_behind_alternative(
        self, item: SequenceInput, of_chain: SequenceInput, length: int, output: SequenceOutput
    ) -> None:
        """Judge once more what a step accepts, with the alternative behind it if that is what follows."""
        assert item.behind is not None and output.verdict is not None and of_chain.drafted is not None
        (left,) = self._left_rounds[item.behind].branches
        accepted, following = output.verdict
        if accepted >= item.alternatives or left.alternatives is None or not of_chain.drafted.sampling.greedy:
            return
        drafted = of_chain.drafted.tokens[accepted]
        other = next((int(token) for token in left.alternatives[accepted] if token != drafted), None)
        if other != following:
            return
        tokens = [*of_chain.drafted.tokens[:accepted], following]
        item.kv.length = length
        judged = replace(of_chain.drafted, tokens=tokens, supports=[])
        again = replace(of_chain, tokens=[of_chain.tokens[0], *tokens], drafted=judged)
        (given,) = self.forward([again])
        assert given.verdict is not None and given.verdict[0] == len(tokens)
        output.verdict, output.alternative = given.verdict, following

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
