"""What lets a scripted model's steps and rounds form a device chain, without a device: all runs at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specahead.engine.sampling.distributions import Support
from specahead.engine.steps.device_chain import NO_ALTERNATIVE, Imposed
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.outputs import RoundsUnderWay, StepUnderWay
from specahead.engine.steps.requests import RoundOutput, RoundRequest
from specahead.engine.steps.runner import TargetOrDraftRunner


@dataclass
class HostChain:
    """What the last step and the last rounds have left, a row a sequence."""

    verdicts: Sequence[Imposed] = ()
    rounds: list[RoundOutput] = field(default_factory=list)


class ChainingRunner(TargetOrDraftRunner):
    """Launches by the `forward` and `draft_rounds` that a model has. It chains where `chains_rounds` is set."""

    beside = 0  # alternatives that run beside drafted tokens, at most
    _chain = HostChain()

    def make_chain(self, *sizes: int) -> Any:
        self._chain = HostChain()
        return self._chain

    def join_chain(self, chain: Any) -> None:
        self._chain = chain

    def launch_rounds(self, requests: list[RoundRequest], imposed: Sequence[Imposed] | None = None) -> RoundsUnderWay:
        verdicts = self._chain.verdicts if imposed is None else imposed
        self._chain.rounds = self._follow(requests, verdicts)
        return RoundsUnderWay.finished(self._chain.rounds)

    def _follow(self, requests: list[RoundRequest], verdicts: Sequence[Imposed]) -> list[RoundOutput]:
        """Draft behind what the step has left, as if the host had seen it; rounds that follow none as they are."""
        lengths, known, begins = [item.kv.length for item in requests], [], []
        for item in requests:
            before = item.follows
            if before is None:
                known.append(item)
                begins.append((None, None))
                continue
            accepted, token, alternative = verdicts[before.row]
            item.kv.length -= before.judged - accepted
            tokens = [before.previous[accepted] if alternative < 0 else alternative, token]
            draws, announce = before.uniforms[accepted:][: len(item.uniforms)], before.announce[accepted]
            known.append(replace(item, tokens=tokens, uniforms=draws, announce=announce, follows=None))
            begins.append(((accepted, token), alternative if alternative >= 0 else None))
        try:
            outputs = self.draft_rounds(known)
        finally:
            for item, length in zip(requests, lengths, strict=True):
                if item.follows is not None:
                    item.kv.length = length
        return [
            replace(output, began=begun, alternative=alternative)
            for output, (begun, alternative) in zip(outputs, begins, strict=True)
        ]

    def alternatives_beside(self, gamma: int) -> int:
        return min(gamma, self.beside)

    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Imposed] | None = None) -> StepUnderWay:
        if all(item.draft_row is None for item in inputs):
            return super().launch(inputs, imposed)
        known = [self._known(item) for item in inputs]
        lengths, outputs = [item.kv.length for item in inputs], self.forward(known)
        verdicts: list[Imposed] = []
        for item, of_chain, length, output in zip(inputs, known, lengths, outputs, strict=True):
            if item.draft_row is not None:
                self._accept_alternative(item, of_chain, length, output)
            item.kv.length = length + item.rows
            accepted, following = output.verdict
            other = NO_ALTERNATIVE if output.alternative is None else output.alternative
            verdicts.append((max(0, accepted - item.held), following, other))
        self._chain.verdicts = verdicts
        return lambda: outputs

    def _accept_alternative(
        self, item: SequenceInput, of_chain: SequenceInput, length: int, output: SequenceOutput
    ) -> None:
        """Judge once more what a step accepts, with the alternative behind it if that is what follows."""
        (left,) = self._chain.rounds[item.draft_row].branches
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
        if item.draft_row is None:
            return item
        of_round = self._chain.rounds[item.draft_row]
        (left,) = of_round.branches
        count = len(item.drafted.tokens) - item.held
        supports = []
        if left.ids is not None and left.probs is not None:
            supports = [Support(ids, probs) for ids, probs in zip(left.ids[:count], left.probs[:count], strict=True)]
        tokens = [*item.drafted.tokens[: item.held], *left.tokens[:count]]
        drafted = replace(item.drafted, tokens=tokens, supports=supports)
        read, bitmap = item.read, of_round.bitmap
        if read is not None and bitmap is not None:
            assert not read.budget.bitmap.any()
            words = read.budget.bitmap.shape[1]
            read = replace(read, budget=replace(read.budget, bitmap=bitmap[:, :words]))
        return replace(item, tokens=[item.tokens[0], *tokens], read=read, drafted=drafted, draft_row=None)
