"""The shapes of passes: of captured steps, which come in few sizes, and of passes of their exact size."""

from dataclasses import replace
from functools import cache

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.sampling.judging import WIDE_SUPPORT, Drafted, cuts_of, support_of
from specahead.engine.steps.device_chain import MOST_CHAINED
from specahead.engine.steps.grouping import StepLimits
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.shapes import Choosers, PassShape
from specahead.kernels.backends import power_of_two
from specahead.kernels.paged_attention import LEAST_ROWS, MAX_ROWS

FEW = 64  # entries of a drafted token's distribution, and a top_k, that the graphs of most requests have room for


class CapturedShapes:
    """Chooses the shapes of one runner's captured steps, by the place that they may have in the device chain.

    chains_steps: whether a step may begin before the host has seen the last one.
    """

    def __init__(self, kv: KVCache, limits: StepLimits, chains_steps: bool) -> None:
        self._kv, self._limits, self.chains_steps = kv, limits, chains_steps
        self.judges_drafts = False  # whether steps of several tokens may judge what a draft's rounds leave
        self._turn = 1

    def of(self, inputs: list[SequenceInput]) -> PassShape:
        """Return the shape of the step of inputs of one kind."""
        shape = step_shape(inputs, self._kv, self._limits)
        if not self.judges_drafts or shape.judge is None or shape.queries == 1 or shape.drafts:
            return shape
        shape = replace(shape, judges_drafts=True)
        if self._limits.chosen_from or shape.queries != self._limits.step_queries:
            return shape
        return with_alternatives(shape, self._limits)

    def of_started(self, inputs: list[SequenceInput]) -> PassShape:
        """Return the shape of a step that the host waits for. One that drafts runs a graph of a step that is followed,
        so that it needs none of its own.
        """
        shape = self.of(inputs)
        chained = self.chains_steps and shape.drafts > 0 and shape.sequences <= MOST_CHAINED
        return self._in_turn(shape) if chained else shape

    def of_followed(self, inputs: list[SequenceInput]) -> PassShape:
        """Return the shape of a step that the next one may follow before the host has seen it; it judges no draft."""
        return self._in_turn(step_shape(inputs, self._kv, self._limits))

    def of_all_like(self, item: SequenceInput, count: int) -> list[PassShape]:
        """Return the shapes of all steps that `count` inputs like this one may run in."""
        shape = self.of([item] * count)
        turns: tuple[int, ...] = (0,)
        if self.chains_steps and shape.drafts:
            turns = 1, 2
        elif self.chains_steps and item.drafted and item.read is None and len(item.tokens) == 1:
            turns = 0, 1, 2
        return [replace(shape, turn=turn) for turn in turns]

    def _in_turn(self, shape: PassShape) -> PassShape:
        self._turn = 3 - self._turn
        return replace(shape, turn=self._turn)


@cache
def alternatives_beside(gamma: int, queries: int, limits: StepLimits) -> int:
    """Return how many of γ drafted tokens have an alternative, in steps of up to `queries` queries a sequence.

    As many as fit into the tile of rows that attention takes for such a step anyway: they cost next to nothing. Over
    KV in 8 bits more than 32 rows come in steps of 8, and 64 take 1.6 times as long as 40 (an H200, 8 x 32K).
    """
    rows = limits.group * queries
    if rows > MAX_ROWS:
        return 0
    tile = max(LEAST_ROWS, power_of_two(rows))
    if limits.eight_bit and tile > 32:
        tile = -(-rows // 8) * 8
    return max(0, min(gamma, tile // limits.group - 1 - gamma))


@cache
def with_alternatives(shape: PassShape, limits: StepLimits) -> PassShape:
    """Return the shape of a captured step with room for the alternatives of all numbers of drafted tokens."""
    beside = [alternatives_beside(gamma, shape.queries, limits) for gamma in range(shape.queries)]
    longest = max([1 + gamma + count for gamma, count in enumerate(beside)] + [shape.queries])
    return replace(shape, rows=shape.sequences * longest, longest=longest).judging(alternatives=max(beside))


def step_shape(inputs: list[SequenceInput], kv: KVCache, limits: StepLimits) -> PassShape:
    """Return the shape of the captured step that inputs of one kind run in.

    So that there are few shapes, rounds with wide distributions, which are those that confirm held tokens, run in the
    widest steps, and of the widest steps those with lists all have room for such distributions.
    """
    longest = max(len(item.tokens) for item in inputs)
    pinned = limits.pins(inputs[0])
    sequences = limits.pinned_sequences if pinned else power_of_two(len(inputs))
    queries = limits.queries
    if not pinned and support_of(_rounds(inputs)) <= FEW:
        queries = next(n for n in (1, limits.step_queries, limits.queries) if n >= longest)
    if inputs[0].read is not None and inputs[0].read.drafts and not pinned:
        queries = longest  # all but the first of a sequence are drafted
    shape = PassShape(sequences, sequences * queries, queries, limits.pages, pinned=pinned)
    shape = _complete(shape, inputs, kv, limits)
    if shape.judge is None:
        return replace(shape, gives_logits=any(item.logits_rows for item in inputs))
    support, cuts = _size_for(shape.judge.support, limits), _size_for(shape.judge.cuts, limits)
    if support and shape.read.is_sparse and queries > limits.step_queries and not limits.pinned:
        support = max(support, WIDE_SUPPORT)
    return shape.judging(support=support, cuts=cuts)


def _rounds(inputs: list[SequenceInput]) -> list[Drafted]:
    return [item.drafted for item in inputs if item.drafted is not None]


def _size_for(count: int, limits: StepLimits) -> int:
    """Return how many of a row's likeliest tokens a captured step has room for, to hold `count`; 0 for 0.

    There are three sizes and no more, because clients choose top_k and drafts choose how much of a distribution they
    send: each further size would be a graph more.
    """
    return next(size for size in (0, FEW, WIDE_SUPPORT, limits.vocab) if size >= count)


def exact_shape(inputs: list[SequenceInput], kv: KVCache, limits: StepLimits, rows: int = 0) -> PassShape:
    """Return the shape of a pass that has room for these inputs of one kind and for nothing more.

    rows: that the pass has in any case, with splits of attention pinned; 0: as many as there are tokens.
    """
    longest = max(rows, *(len(item.tokens) for item in inputs))
    alternatives = max(item.alternatives for item in inputs)
    if kv.device.type == "cuda" and limits.is_prompt(inputs[0]):
        longest = max(longest, MAX_ROWS)  # so that tiles of queries have one size, whatever the chunks
    pages = max(len(item.kv.pages) for item in inputs)
    if kv.device.type == "cuda" and inputs[0].read is not None:
        pages = limits.pages  # kernels take remembered weights of whole contexts
    count = rows or sum(item.rows for item in inputs)
    shape = PassShape(len(inputs), count, longest, pages, pinned=rows > 0)
    shape = _complete(shape, inputs, kv, limits)
    if alternatives:
        longest = max(item.rows for item in inputs)
        shape = replace(shape, longest=longest).judging(alternatives=alternatives)
    return shape


def _complete(shape: PassShape, inputs: list[SequenceInput], kv: KVCache, limits: StepLimits) -> PassShape:
    """Return the shape with how these inputs of one kind attend and what they give."""
    first, read = inputs[0], inputs[0].read
    shape = replace(shape, light=first.light)
    if 0 < limits.chosen_from <= shape.pages * PAGE_SIZE:
        if read is not None:
            raise NotImplementedError("sparse reads are not built for a model that chooses blocks by itself")
        shape = replace(shape, choosers=Choosers.EACH if limits.each_chooses(first) else Choosers.FIRST)
    if limits.judges(first):
        rounds = _rounds(inputs)
        cuts = min(cuts_of(rounds), limits.vocab)
        shape = shape.judging(support=support_of(rounds), cuts=cuts, draws_own=limits.pinned)
    if read is None:
        return shape
    weighs = read.drafts or all(item.read and item.read.budget.everything for item in inputs)
    shape = shape.reading(
        block_size=read.block_size,
        dense_layers=read.dense_layers,
        decay=read.budget.memory.decay,
        weighs=weighs,
        reports=any(item.read.report_blocks for item in inputs if item.read),
    )
    if read.group_means:
        if kv.means is None:
            raise ValueError("no room for group means was made: call keep_group_means first")
        shape = shape.reading(groups=max(1, shape.pages * PAGE_SIZE // kv.means.group_size))
    if not read.drafts:
        return shape
    if shape.judge is not None and shape.judge.support:
        shape = shape.judging(support=WIDE_SUPPORT)
    return replace(shape, drafts=len(first.tokens) - 1)
