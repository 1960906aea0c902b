"""Which inputs run in one pass, and in what shape: of a captured step, or of the exact size."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.sampling.judging import WIDE_SUPPORT, cuts_of, support_of
from specahead.engine.steps.inputs import NO_MEMORY, SequenceInput, SharedBudget
from specahead.engine.steps.shapes import Choosers, PassShape
from specahead.kernels.backends import power_of_two
from specahead.kernels.paged_attention import LEAST_ROWS, MAX_ROWS

FEW = 64  # entries of a drafted token's distribution, and a top_k, that the graphs of most requests have room for


@dataclass(frozen=True)
class StepLimits:
    """The sizes of captured steps."""

    pages: int
    """Pages of a sequence, at most."""
    step_queries: int
    """Tokens of a sequence in most steps."""
    queries: int
    """Tokens of a sequence in a step, at most; a sequence with more reads a prompt."""
    vocab: int
    """Entries of a row of logits."""
    pinned_sequences: int = 0
    """Sequences of every step, where results must not depend on the batch; 0: a power of two. Pinned steps have room
    for `queries` tokens of each sequence, except for steps whose tokens a later pass judges: their rounding changes no
    result."""
    chosen_from: int = 0
    """Tokens of a sequence from which on the model's own attention chooses blocks; 0: it reads everything."""
    shares_choice: bool = True
    """Whether the tokens of a round share the blocks that its first one chooses; else each token chooses its own."""

    @property
    def pinned(self) -> bool:
        return self.pinned_sequences > 0

    def pins(self, item: SequenceInput) -> bool:
        """Whether what an input gives must not depend on the batch."""
        return self.pinned and not item.screens

    def is_prompt(self, item: SequenceInput) -> bool:
        """Whether an input runs in a pass of its exact size."""
        # A prompt's last part may be short or long, by what else is read: where steps are pinned that must make no
        # difference.
        plain = item.drafted is None and item.read is None
        long = len(item.tokens) > (self.step_queries if item.ends_prompt else self.queries)
        return long or (self.pinned and plain)

    def each_chooses(self, item: SequenceInput) -> bool:
        """Whether each token of an input chooses blocks for itself: a prompt's do, whatever those of rounds do."""
        return self.chosen_from > 0 and (not self.shares_choice or item.drafted_from > 1)

    def judges(self, item: SequenceInput) -> bool:
        """Whether an input's pass judges it itself: the end of a prompt is judged once its pass has run."""
        return item.drafted is not None and not (item.ends_prompt and self.is_prompt(item))


def alternatives_beside(gamma: int, queries: int, group: int) -> int:
    """Return how many of γ drafted tokens have an alternative, in steps of up to `queries` queries a sequence.

    As many as fit into the tile of rows that attention takes for such a step anyway: they cost next to nothing.
    group: query heads of a KV head.
    """
    if group * queries > MAX_ROWS:
        return 0
    tile = max(LEAST_ROWS, power_of_two(group * queries))
    return max(0, min(gamma, tile // group - 1 - gamma))


def with_alternatives(shape: PassShape, group: int) -> PassShape:
    """Return the shape of a captured step with room for the alternatives of all numbers of drafted tokens."""
    beside = [alternatives_beside(gamma, shape.queries, group) for gamma in range(shape.queries)]
    longest = max([1 + gamma + count for gamma, count in enumerate(beside)] + [shape.queries])
    return replace(shape, rows=shape.sequences * longest, longest=longest).judging(alternatives=max(beside))


def join_rounds(inputs: list[SequenceInput]) -> list[SequenceInput]:
    """Return the inputs with the rounds that read everything made ones that list all blocks, if others share budgets.

    So they all run in one pass, which reads the model's weights once. Ends of prompts stay as they are: weighing what
    thousands of tokens read takes gigabytes.
    """
    shared = next((item.read for item in inputs if item.drafted and item.read and not item.read.drafts), None)
    if shared is None:
        return inputs
    budget, memory = shared.budget, shared.budget.memory
    everything = SharedBudget.of_everything(replace(memory, index=NO_MEMORY), budget.dense_layers)
    whole = replace(shared, budget=everything, report_blocks=False)
    joins = [item.read is None and item.drafted is not None and not item.ends_prompt for item in inputs]
    return [replace(item, read=whole) if joined else item for item, joined in zip(inputs, joins, strict=True)]


def kind_of(item: SequenceInput, limits: StepLimits) -> Hashable:
    """Return the same value for inputs that run in one pass."""
    read = item.read
    kind: tuple[Hashable, ...] = (limits.is_prompt(item), limits.judges(item), item.light)
    kind += (limits.pins(item), limits.each_chooses(item))
    if read is None:
        return kind
    kind += (read.block_size, read.group_means, read.dense_layers)
    # Lists of all blocks round otherwise than a pass without lists.
    kind += (limits.pins(item) and read.budget.everything,)
    memory = read.budget.memory
    drafts = len(item.tokens) if read.drafts else 0
    return (*kind, drafts, memory.decay, memory.importance.numpy().tobytes())


def step_shape(inputs: list[SequenceInput], kv: KVCache, limits: StepLimits) -> PassShape:
    """Return the shape of the captured step that inputs of one kind run in."""
    longest = max(len(item.tokens) for item in inputs)
    pinned = limits.pins(inputs[0])
    sequences = limits.pinned_sequences if pinned else power_of_two(len(inputs))
    queries = limits.queries
    if not pinned:
        queries = next(n for n in (1, limits.step_queries, limits.queries) if n >= longest)
    if inputs[0].read is not None and inputs[0].read.drafts and not pinned:
        queries = longest  # all but the first of a sequence are drafted
    shape = PassShape(sequences, sequences * queries, queries, limits.pages, pinned=pinned)
    shape = _complete(shape, inputs, kv, limits)
    if shape.judge is not None:
        support, cuts = _size_for(shape.judge.support, limits), _size_for(shape.judge.cuts, limits)
        shape = shape.judging(support=support, cuts=cuts)
    return shape


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
        rounds = [item.drafted for item in inputs if item.drafted is not None]
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
