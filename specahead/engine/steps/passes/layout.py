"""From the inputs of a pass to the arrays that it takes from the host."""

import numpy as np

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.sampling.distributions import USE_ACCEPT, USE_DRAFT, USE_TARGET, uniforms
from specahead.engine.sampling.judging import lay_out_verdicts
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.passes.behind_steps import AHEAD
from specahead.engine.steps.passes.shape import PassShape
from specahead.engine.steps.staging import Staging

# Of the uniforms that are laid out here: those of steps that draft, and those of all positions at which one may begin.
_USES = {"accept_uniforms" + AHEAD: USE_ACCEPT, "draw_uniforms" + AHEAD: USE_TARGET}
_DRAFTING = "draft_uniforms", "draft_uniforms" + AHEAD


def lay_out_pass(
    staging: Staging,
    shape: PassShape,
    inputs: list[SequenceInput],
    indices: list[int],
    kv: KVCache,
    tables: list[np.ndarray] | None = None,
) -> None:
    """Bring the inputs of a pass to the device, through the inputs of its buffers.

    indices: the index of each sequence's memory, where budgets are shared out. tables: block tables, where they do not
    name where the pages lie in the KV's tensors.
    """
    staging.begin()
    host = staging.host
    gpu_pages = [kv.gpu_pages(item.kv) for item in inputs]
    items = [(item.kv, item.tokens + [0] * item.alternatives) for item in inputs]
    lay_out_rows(host, items, gpu_pages, tables, [item.first_position for item in inputs])
    if shape.alternatives:
        _lay_out_alternatives(host, inputs)
    if shape.turn:
        host["follows"][:] = -1
        for i, item in enumerate(inputs):
            host["follows"][i] = -1 if item.follows is None else item.follows
    if shape.behind:
        host["behind"][:], host["held"][:] = -1, 0
        for i, item in enumerate(inputs):
            host["behind"][i], host["held"][i] = -1 if item.behind is None else item.behind, item.held
    if shape.fetches:
        host["round"][0] = kv.next_round()
        for i, item in enumerate(inputs):  # a last block may reach beyond the pages that there are
            host["block_tables"][i, len(item.kv.pages) :] = -1
    if shape.decay is not None:
        _lay_out_budget(host, shape, inputs, indices)
    elif shape.width:
        _lay_out_lists(host, inputs)
    if shape.groups:
        _lay_out_groups(host, [item.kv for item in inputs])
    if shape.judged:
        rounds = [item.drafted for item in inputs if item.drafted is not None]
        lay_out_verdicts(host, rounds)
        drafting = USE_TARGET if shape.draws_own else USE_DRAFT
        for name, use in (_USES | dict.fromkeys(_DRAFTING, drafting)).items():
            if (array := host.get(name)) is not None:
                for i, drafted in enumerate(rounds):
                    array[i] = uniforms(drafted.sampling.seed, drafted.base, array.shape[1], use)
        rows = host["logits_rows"][: shape.sequences * shape.queries].reshape(shape.sequences, shape.queries)
        starts = host["query_starts"]
        # Rows behind a sequence's last one are not looked at: any will do.
        most = max(0, int(starts[-1]) - 1)
        rows[:] = np.minimum(starts[:-1, None] + np.arange(shape.queries), most)
        if shape.alternatives:
            rows = host["logits_rows"][shape.sequences * shape.queries :].reshape(shape.sequences, shape.alternatives)
            beside = starts[:-1] + 1 + host["draft_counts"]
            rows[:] = np.minimum(beside[:, None] + np.arange(shape.alternatives), most)
    elif "logits_rows" in host:
        host["logits_rows"][:] = logits_rows_of(inputs)
    staging.send()


def _lay_out_alternatives(host: dict[str, np.ndarray], inputs: list[SequenceInput]) -> None:
    """Write what each row sees, and where alternatives stand: each where the token is that it is an alternative to.

    Their KV lies behind that of the sequence's tokens.
    """
    host["visible"][:], host["alternative_counts"][:], host["alternatives"][:] = 0, 0, -1
    row = 0
    for i, item in enumerate(inputs):
        chain, beside = len(item.tokens), item.alternatives
        at = item.first_position + np.arange(item.rows)
        here, others = slice(row, row + chain), slice(row + chain, row + item.rows)
        host["visible"][here, 0] = at[:chain] + 1
        host["visible"][others, 0] = host["positions"][others] = at[1 : 1 + beside]
        host["visible"][others, 1], host["visible"][others, 2] = at[chain:], at[chain:] + 1
        host["alternative_counts"][i] = beside
        row += item.rows


def logits_rows_of(inputs: list[SequenceInput]) -> np.ndarray:
    """Return the rows of a pass that give logits, int64 [rows], in the order of the inputs."""
    ends = np.cumsum([len(item.tokens) for item in inputs])
    rows = [np.arange(end - item.logits_rows, end) for item, end in zip(inputs, ends, strict=True)]
    return np.concatenate(rows).astype(np.int64)


def lay_out_rows(
    host: dict[str, np.ndarray],
    items: list[tuple[SequenceKV, list[int]]],
    gpu_pages: list[np.ndarray] | None = None,
    tables: list[np.ndarray] | None = None,
    starts: list[int] | None = None,
) -> None:
    """Write sequences and the tokens that each is to run next into arrays of `rows_layout`; rows behind are empty.

    gpu_pages: where the pages of each sequence lie in the KV's tensors; None: at their numbers. tables: the block
    tables; None: `gpu_pages`. starts: the position of each one's first token; None: behind what its KV holds.
    """
    for name in ("slots", "kept_slots"):
        if name in host:
            host[name][:] = -1
    host["token_ids"][:] = 0
    host["lengths"][:] = 0
    row = 0
    for i, (kv, tokens) in enumerate(items):
        start = kv.length if starts is None else starts[i]
        at = np.arange(start, start + len(tokens))
        pages = kv.table() if gpu_pages is None else gpu_pages[i]
        here = slice(row, row + len(tokens))
        host["token_ids"][here], host["positions"][here] = tokens, at
        host["slots"][here] = slots_of(pages, at)
        host["block_tables"][i, : len(pages)] = pages if tables is None else tables[i]
        if "kept_slots" in host:
            host["kept_slots"][here] = slots_of(kv.table(), at)
            host["kept_tables"][i, : len(kv.pages)] = kv.table()
        host["lengths"][i] = start + len(tokens)
        host["query_starts"][i] = row
        row += len(tokens)
    host["query_starts"][len(items) :] = row


def slots_of(pages: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return where positions lie in pages, int64: page * PAGE_SIZE + offset."""
    slots: np.ndarray = pages[positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    return slots


def _lay_out_lists(host: dict[str, np.ndarray], inputs: list[SequenceInput]) -> None:
    host["counts"][:] = 0
    for i, item in enumerate(inputs):
        assert item.read is not None and item.read.lists is not None
        present = [entry for entry in item.read.lists if entry is not None]
        for at, (blocks, count) in enumerate(present):
            host["lists"][at, i, :, : blocks.shape[1]] = blocks
            host["counts"][at, i] = count


def _lay_out_budget(
    host: dict[str, np.ndarray], shape: PassShape, inputs: list[SequenceInput], indices: list[int]
) -> None:
    host["blocks"][:], host["room"][:], host["indices"][:] = 0, 0, -1
    bitmaps = host["bitmaps"].view(np.uint64)
    for i, (item, index) in enumerate(zip(inputs, indices, strict=True)):
        assert item.read is not None and item.read.budget is not None
        budget = item.read.budget
        bitmaps[i, :, : budget.bitmap.shape[1]] = budget.bitmap
        host["first"][i], host["last"][i], host["indices"][i] = budget.first, budget.last, index
        host["blocks"][i] = -(-(item.first_position + item.rows) // shape.block_size)
        host["room"][i] = max(0, budget.room)
        if not i:  # the same for all inputs of a pass
            host["importance"][:] = budget.memory.importance


def _lay_out_groups(host: dict[str, np.ndarray], sequences: list[SequenceKV]) -> None:
    host["group_counts"][:] = 0
    for i, sequence in enumerate(sequences):
        host["group_tables"][i, : len(sequence.groups)] = sequence.groups
        host["group_counts"][i] = len(sequence.groups)
