"""The shape of a pass: all that its launches are specialised for."""

from dataclasses import dataclass

from specahead.engine.kv.pages import PAGE_SIZE


@dataclass(frozen=True)
class PassShape:
    """All that the launches of a pass are specialised for.

    sequences: how many there is room for. rows: of all their tokens together. queries: of one sequence, at most.
    pages: of one sequence, at most. block_size: tokens of a block, where blocks are read. width: blocks of a list,
    at most; 0: all layers are dense. groups: group means of a sequence, at most; 0: none stand in. read_weights:
    whether listed blocks give their weights. dense_layers: the layers without lists. decay: of what is remembered,
    where a budget is shared out in the pass. judged: whether the pass ends in verdicts, each sequence having
    drafted all its tokens but the first. support: entries of a distribution that they were drawn from, at most; 0:
    all are greedy. cuts: the largest top_k that there is room for, 0 where no distribution is cut by top_k or
    min_p. pinned: whether splits of attention are independent of the batch. draws_own: whether the target draws its own
    token at each position, and accepts a drafted one that is the same. kept: whether some layers' pages lie at
    their own numbers, others' where the KV put them. fetches: whether block tables name pages of the backing store,
    and listed ones are fetched first. drafts: how many tokens of each sequence, all but the first, are drafted before
    by passes over lists, which are all that runs if they fetch. weighs: whether the pass that judges reads everything,
    and has the budget's memory take up what it weighs (SparseRead.drafts). turn: 1 or 2 for a step of one token a
    sequence, or one that drafts, which may begin before the host has seen the last one: it takes what the last one has
    left on the device, and leaves its own (engine.passes.behind_steps). Such steps take turns between two sets of
    buffers. 0: for all others. behind: whether drafted tokens may be those that a draft's rounds have left on the
    device. alternatives: rows of a sequence, at most, that run beside its drafted tokens (SequenceInput.alternatives);
    longest: all rows of one sequence, at most, where there are such. light: whether it runs by the weights of what a
    later pass judges.
    """

    sequences: int
    rows: int
    queries: int
    pages: int
    block_size: int = 0
    width: int = 0
    groups: int = 0
    read_weights: bool = False
    dense_layers: tuple[int, ...] = ()
    decay: float | None = None
    judged: bool = False
    support: int = 0
    cuts: int = 0
    pinned: bool = False
    draws_own: bool = False
    kept: bool = False
    fetches: bool = False
    drafts: int = 0
    weighs: bool = False
    turn: int = 0
    behind: bool = False
    alternatives: int = 0
    longest: int = 0
    light: bool = False

    @property
    def most_rows(self) -> int:
        """Rows of one sequence, at most."""
        return self.longest or self.queries

    @property
    def shares_out(self) -> bool:
        """Whether lists are made of a budget; a pass that weighs needs none but to draft."""
        return self.decay is not None and (self.drafts > 0 or not self.weighs)

    @property
    def drafts_alone(self) -> bool:
        """Whether nothing runs but the passes that draft."""
        return self.drafts > 0 and self.fetches

    @property
    def blocks(self) -> int:
        """How many blocks a sequence has, at most."""
        return -(-self.pages * PAGE_SIZE // self.block_size)

    def sparse_layers(self, num_layers: int) -> list[int]:
        """Return the layers with lists, of all that a model has."""
        return [layer for layer in range(num_layers) if layer not in self.dense_layers]
