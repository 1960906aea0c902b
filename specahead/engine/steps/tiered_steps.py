"""Running inputs whose KV has partly left the GPU: passes fetch the pages of listed blocks, or whole sequences."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from specahead.engine.kv.cache import KVCache
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.outputs import in_order
from specahead.engine.steps.pass_runner import PassRunner
from specahead.engine.steps.shapes import PassShape

ShapeOf = Callable[[list[SequenceInput]], PassShape]  # the shape that some inputs run in
RunNear = Callable[[list[SequenceInput]], list[SequenceOutput]]  # runs inputs all of whose KV is on the GPU


@dataclass(frozen=True)
class TieredSteps:
    """Runs inputs of one kind over tiers.

    Sparse inputs fetch the pages of their blocks: all together if the GPU has room, else in halves. Inputs that read
    everything, or cannot fetch, run over whole sequences that are staged on the GPU. A sequence that drafts for itself
    drafts in a pass that fetches, and its tokens are judged in a second pass.
    """

    kv: KVCache
    passes: PassRunner
    shape_of: ShapeOf
    run_near: RunNear

    def is_near(self, inputs: list[SequenceInput]) -> bool:
        """Return whether all KV of the inputs is on the GPU."""
        return all(self.kv.is_resident(item.kv) for item in inputs)

    def run(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Run inputs of one kind."""
        if self.is_near(inputs):
            return self.run_near(inputs)
        shape = self.shape_of(inputs)
        if not shape.read.weighs and any(map(lists_everything, inputs)):
            # Those that list everything run apart, last: in one pass they would overflow the room for fetched pages,
            # and evict pages that the others find there.
            kinds = ([i for i, item in enumerate(inputs) if lists_everything(item) is last] for last in (False, True))
            return in_order((members, self.run([inputs[i] for i in members])) for members in kinds)
        if shape.read.weighs:
            fetched = self._draft(inputs)
            outputs = self._run_staged(inputs, lambda part: replace(self.shape_of(part), drafts=0))
            for output, tokens in zip(outputs, fetched, strict=True):
                output.tokens_fetched += tokens
            return outputs
        if self.passes.can_fetch(shape):
            fetching = self.passes.run_fetching(inputs, shape.reading(fetches=True))
            if fetching is not None:
                return fetching
            if len(inputs) > 1:
                half = len(inputs) // 2
                return self.run(inputs[:half]) + self.run(inputs[half:])
        return self._run_staged(inputs, self.shape_of)

    def _draft(self, inputs: list[SequenceInput]) -> list[int]:
        """Draft the inputs' tokens in passes that fetch: all together if the GPU has room, else in halves.

        A sequence whose blocks do not fit alone, or cannot be fetched, drafts nothing and keeps its first token alone.
        Returns the number of (layer, KV head, token) triples that were fetched for each input.
        """
        shape = self.shape_of(inputs)
        if not shape.drafts:
            return [0] * len(inputs)
        if self.passes.can_fetch(shape):
            drafted = self.passes.run_fetching(inputs, shape.reading(fetches=True))
            if drafted is not None:
                return [output.tokens_fetched for output in drafted]
            if len(inputs) > 1:
                half = len(inputs) // 2
                return self._draft(inputs[:half]) + self._draft(inputs[half:])
        for item in inputs:
            assert item.drafted is not None
            del item.tokens[1:], item.drafted.tokens[:]
        return [0] * len(inputs)

    def _run_staged(self, inputs: list[SequenceInput], shape_of: ShapeOf) -> list[SequenceOutput]:
        """Run inputs over whole sequences that are staged on the GPU, in as few passes as there is room for."""
        outputs = []
        remaining = iter(inputs)
        for staged in self.kv.stage([item.kv for item in inputs]):
            part = list(itertools.islice(remaining, len(staged.tables)))
            brought = self.passes.start_exact(part, shape_of(part), staged)()
            for output, tokens in zip(brought, staged.count_fetched(), strict=True):
                output.tokens_fetched = tokens
            outputs += brought
        return outputs


def lists_everything(item: SequenceInput) -> bool:
    """Return whether an input's budget names all blocks."""
    return item.read is not None and item.read.budget.everything
