"""Running inputs whose KV has partly left the GPU: passes fetch the pages of listed blocks, or whole sequences."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from specahead.engine.kv.cache import KVCache
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.pass_runner import PassRunner
from specahead.engine.steps.shapes import PassShape

ShapeOf = Callable[[list[SequenceInput]], PassShape]  # the shape that some inputs run in
RunNear = Callable[[list[SequenceInput]], list[SequenceOutput]]  # runs inputs all of whose KV is on the GPU


class TieredSteps:
    """Runs inputs of one kind over tiers.

    Sparse inputs fetch the pages of their blocks: all together if the GPU has room, else in halves. Inputs that read
    everything, or cannot fetch, run over whole sequences that are staged on the GPU. A sequence that drafts for itself
    drafts in a pass that fetches, and its tokens are judged in a second pass.
    """

    def __init__(self, kv: KVCache, passes: PassRunner) -> None:
        self._kv, self._passes = kv, passes

    def is_near(self, inputs: list[SequenceInput]) -> bool:
        """Return whether all KV of the inputs is on the GPU."""
        return all(self._kv.is_resident(item.kv) for item in inputs)

    def run(self, inputs: list[SequenceInput], shape_of: ShapeOf, run_near: RunNear) -> list[SequenceOutput]:
        """Run inputs of one kind. shape_of: the shape that some of them run in."""
        if self.is_near(inputs):
            return run_near(inputs)
        shape = shape_of(inputs)
        if not shape.read.weighs and any(lists_everything(item) for item in inputs):
            return self._run_apart(inputs, shape_of, run_near)
        if shape.read.weighs:
            fetched = self._draft(inputs, shape_of)
            outputs = self._run_staged(inputs, lambda part: replace(shape_of(part), drafts=0))
            for output, tokens in zip(outputs, fetched, strict=True):
                output.tokens_fetched += tokens
            return outputs
        if self._passes.can_fetch(shape):
            fetching = self._passes.run_fetching(inputs, shape.reading(fetches=True))
            if fetching is not None:
                return fetching
            if len(inputs) > 1:
                half = len(inputs) // 2
                return [
                    output for part in (inputs[:half], inputs[half:]) for output in self.run(part, shape_of, run_near)
                ]
        return self._run_staged(inputs, shape_of)

    def _run_apart(self, inputs: list[SequenceInput], shape_of: ShapeOf, run_near: RunNear) -> list[SequenceOutput]:
        """Run inputs that read everything after the others. In one pass with them they would overflow the room for
        fetched pages, and evict pages that the others find there.
        """
        outputs: dict[int, SequenceOutput] = {}
        for everything in (False, True):
            members = [i for i, item in enumerate(inputs) if lists_everything(item) is everything]
            outputs.update(zip(members, self.run([inputs[i] for i in members], shape_of, run_near), strict=True))
        return [outputs[i] for i in range(len(inputs))]

    def _draft(self, inputs: list[SequenceInput], shape_of: ShapeOf) -> list[int]:
        """Draft the inputs' tokens in passes that fetch: all together if the GPU has room, else in halves.

        A sequence whose blocks do not fit alone, or cannot be fetched, drafts nothing and keeps its first token alone.
        Returns the number of (layer, KV head, token) triples that were fetched for each input.
        """
        shape = shape_of(inputs)
        if not shape.drafts:
            return [0] * len(inputs)
        if self._passes.can_fetch(shape):
            drafted = self._passes.run_fetching(inputs, shape.reading(fetches=True))
            if drafted is not None:
                return [output.tokens_fetched for output in drafted]
            if len(inputs) > 1:
                half = len(inputs) // 2
                return self._draft(inputs[:half], shape_of) + self._draft(inputs[half:], shape_of)
        for item in inputs:
            assert item.drafted is not None
            del item.tokens[1:], item.drafted.tokens[:]
        return [0] * len(inputs)

    def _run_staged(self, inputs: list[SequenceInput], shape_of: ShapeOf) -> list[SequenceOutput]:
        """Run inputs over whole sequences that are staged on the GPU, in as few passes as there is room for."""
        outputs = []
        remaining = iter(inputs)
        for staged in self._kv.stage([item.kv for item in inputs]):
            part = list(itertools.islice(remaining, len(staged.tables)))
            brought = self._passes.start_exact(part, shape_of(part), staged)()
            for output, tokens in zip(brought, staged.count_fetched(), strict=True):
                output.tokens_fetched = tokens
            outputs += brought
        return outputs


def lists_everything(item: SequenceInput) -> bool:
    """Return whether an input's budget names all blocks."""
    return item.read is not None and item.read.budget.everything
