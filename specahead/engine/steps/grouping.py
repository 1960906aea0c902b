"""Which inputs run in one pass."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from specahead.engine.steps.inputs import NO_MEMORY, SequenceInput, SharedBudget

MAX_OVERHANG = 2 * 65  # tokens beyond the context: two rounds of the largest γ that is served


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
    group: int = 1
    """Query heads of a KV head."""
    eight_bit: bool = False
    """Whether KV is in 8 bits."""
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
        # difference. A prompt that is scored gives logits, for which graphs of unjudged steps are not prepared.
        plain = item.drafted is None and item.read is None
        long = len(item.tokens) > (self.step_queries if item.ends_prompt else self.queries)
        return long or (plain and (self.pinned or item.logits == "all"))

    def each_chooses(self, item: SequenceInput) -> bool:
        """Whether each token of an input chooses blocks for itself: a prompt's do, whatever those of rounds do."""
        return self.chosen_from > 0 and (not self.shares_choice or item.drafted_from > 1)

    def judges(self, item: SequenceInput) -> bool:
        """Whether an input's pass judges it itself: the end of a prompt is judged once its pass has run."""
        return item.drafted is not None and not (item.ends_prompt and self.is_prompt(item))


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
