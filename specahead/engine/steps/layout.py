"""From the inputs of passes and the requests of rounds to the arrays that these take from the host."""

import numpy as np

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, slots_of
from specahead.engine.sampling.distributions import USE_ACCEPT, USE_DRAFT, USE_TARGET, uniforms
from specahead.engine.sampling.judging import Drafted, lay_out_verdicts
from specahead.engine.staging import Buffers, Staging
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.requests import AnnouncementRequest, Branch, RoundRequest
from specahead.engine.steps.shapes import PassShape, RoundShape
from specahead.engine.steps.states import lay_out_states, lay_out_windows

# What the uniforms are for that are laid out here: those of steps that draft (device_chain.UNIFORMS).
_USES = {"all_accept_uniforms": USE_ACCEPT, "all_draw_uniforms": USE_TARGET}
_DRAFTING = "draft_uniforms", "all_draft_uniforms"


def lay_out_pass(
    staging: Staging,
    shape: PassShape,
    inputs: list[SequenceInput],
    indices: list[int],
    kv: KVCache,
    tables: list[np.ndarray] | None = None,
) -> None:
    """Bring the inputs of a pass to the device, through the inputs of its buffers.

    indices: the index of each sequence's memory, where budgets are shared out, or layers fetch what they choose.
    tables: block tables, where they do not name where the pages lie in the KV's tensors.
    """
    staging.begin()
    host = staging.host
    gpu_pages = [kv.gpu_pages(item.kv) for item in inputs]
    items = [(item.kv, item.tokens + [0] * item.alternatives) for item in inputs]
    lay_out_rows(host, items, gpu_pages, tables, [item.first_position for item in inputs])
    if "state_slots" in host:
        lay_out_states(host["state_slots"], inputs)
    if shape.alternatives:
        _lay_out_alternatives(host, inputs)
    if shape.chained:
        _lay_out_chain(host, shape, inputs)
    if shape.read.fetches:
        host["round"][0] = kv.next_round()
        for i, item in enumerate(inputs):  # a last block may reach beyond the pages that there are
            host["block_tables"][i, len(item.kv.pages) :] = -1
    if shape.fetches_chosen:
        host["indices"][:] = -1
        host["indices"][: len(indices)] = indices
    if shape.read.is_sparse:
        _lay_out_budget(host, shape, inputs, indices)
    if shape.read.groups:
        _lay_out_groups(host, [item.kv for item in inputs])
    if shape.judge is not None:
        rounds = [item.drafted for item in inputs if item.drafted is not None]
        lay_out_verdicts(host, rounds)
        _lay_out_uniforms(host, rounds, USE_TARGET if shape.judge.draws_own else USE_DRAFT)
        _lay_out_judged_rows(host, shape, inputs)
    elif "logits_rows" in host:
        host["logits_rows"][:] = logits_rows_of(inputs)
    staging.send()


def _lay_out_uniforms(host: dict[str, np.ndarray], rounds: list[Drafted], drafting: int) -> None:
    """Write the random numbers of steps that draft for themselves. drafting: what those that draft are drawn for."""
    for name, use in (_USES | dict.fromkeys(_DRAFTING, drafting)).items():
        if (array := host.get(name)) is not None:
            for i, drafted in enumerate(rounds):
                array[i] = uniforms(drafted.sampling.seed, drafted.base, array.shape[1], use)


def _lay_out_judged_rows(host: dict[str, np.ndarray], shape: PassShape, inputs: list[SequenceInput]) -> None:
    """Write which rows of the pass give logits: those of the rounds, then those of their alternatives.

    A round begins with the token before the drafted ones. Before that may come the end of a prompt, which gives none.
    """
    last = max(0, int(host["query_starts"][-1]) - 1)
    starts = host["query_starts"][:-1].copy()
    starts[: len(inputs)] += [item.drafted_from - 1 for item in inputs]
    of_rounds = _rows_from(starts, shape.queries, last)
    of_alternatives = _rows_from(starts + 1 + host["draft_counts"], shape.alternatives, last)
    host["logits_rows"][:] = np.concatenate([of_rounds, of_alternatives])


def _rows_from(starts: np.ndarray, count: int, last: int) -> np.ndarray:
    """Return `count` neighbouring rows from each start on, [len(starts) * count].

    A sequence may have fewer rows; what is read in their place is not looked at, and lies within the pass (`last`).
    """
    return np.minimum(starts[:, None] + np.arange(count), last).reshape(-1)


def _lay_out_chain(host: dict[str, np.ndarray], shape: PassShape, inputs: list[SequenceInput]) -> None:
    """Write which rows of the device chain sequences follow, or judge."""
    if shape.turn:
        host["follows"][:], host["judged"][:] = -1, 0
        for i, item in enumerate(inputs):
            if item.follows is not None:
                host["follows"][i], host["judged"][i] = item.follows, shape.drafts
    if shape.judges_drafts:
        host["draft_rows"][:], host["held"][:] = -1, 0
        host["draft_rows"][: len(inputs)] = [-1 if item.draft_row is None else item.draft_row for item in inputs]
        host["held"][: len(inputs)] = [item.held for item in inputs]


def _lay_out_alternatives(host: dict[str, np.ndarray], inputs: list[SequenceInput]) -> None:
    """Write what each row sees, and where alternatives stand: each where the token is that it is an alternative to.

    Their KV lies after that of the sequence's tokens.
    """
    host["visible"][:], host["alternative_counts"][:], host["alternatives"][:] = 0, 0, -1
    rows = np.array([item.rows for item in inputs])
    chain = np.repeat([len(item.tokens) for item in inputs], rows)
    total = len(chain)
    within = np.arange(total) - np.repeat(np.cumsum(rows) - rows, rows)
    places, beside = host["positions"][:total].copy(), within >= chain
    host["visible"][:total, 0] = np.where(beside, places - chain, places) + 1
    host["positions"][:total][beside] = host["visible"][:total, 0][beside]
    host["visible"][:total, 1][beside], host["visible"][:total, 2][beside] = places[beside], places[beside] + 1
    host["alternative_counts"][: len(inputs)] = [item.alternatives for item in inputs]


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
    """Write sequences and the tokens that each is to run next into the arrays of their rows (buffers.py); other rows
    are empty.

    gpu_pages: where the pages of each sequence lie in the KV's tensors; None: at their numbers. tables: the block
    tables; None: `gpu_pages`. starts: the position of each one's first token; None: after what its KV holds.
    """
    host["slots"][:] = -1
    host["token_ids"][:] = 0
    host["lengths"][:] = 0
    if not items:
        host["query_starts"][:] = 0
        return
    places = [kv.table() for kv, _ in items] if gpu_pages is None else gpu_pages
    counts = np.array([len(tokens) for _, tokens in items])
    first = np.array([kv.length for kv, _ in items] if starts is None else starts)
    ends, held = np.cumsum(counts), np.array(list(map(len, places)))
    total, n = int(ends[-1]), len(items)
    at = np.arange(total) + np.repeat(first - (ends - counts), counts)
    host["token_ids"][:total] = [token for _, tokens in items for token in tokens]
    host["positions"][:total] = at
    # As if the sequences' pages followed one another.
    at += PAGE_SIZE * np.repeat(np.cumsum(held) - held, counts)
    host["slots"][:total] = slots_of(np.concatenate(places), at)
    host["lengths"][:n], host["query_starts"][1 : n + 1] = first + counts, ends
    host["query_starts"][0], host["query_starts"][n + 1 :] = 0, total
    for i, pages in enumerate(places if tables is None else tables):
        host["block_tables"][i, : len(pages)] = pages
    if "page_numbers" in host:
        numbers = [kv.table() for kv, _ in items]
        host["page_numbers"][:total] = np.concatenate(numbers)[at // PAGE_SIZE]
        for i, pages in enumerate(numbers):
            host["page_number_tables"][i, : len(pages)] = pages


def _lay_out_budget(
    host: dict[str, np.ndarray], shape: PassShape, inputs: list[SequenceInput], indices: list[int]
) -> None:
    host["blocks"][:], host["room"][:], host["indices"][:] = 0, 0, -1
    bitmaps = host["bitmaps"].view(np.uint64)
    for i, (item, index) in enumerate(zip(inputs, indices, strict=True)):
        assert item.read is not None
        budget = item.read.budget
        bitmaps[i, :, : budget.bitmap.shape[1]] = budget.bitmap
        host["first"][i], host["last"][i], host["indices"][i] = budget.first, budget.last, index
        host["blocks"][i] = -(-(item.first_position + item.rows) // shape.read.block_size)
        host["room"][i] = max(0, budget.room)
        if not i:  # the same for all inputs of a pass
            host["importance"][:] = budget.memory.importance


def _lay_out_groups(host: dict[str, np.ndarray], sequences: list[SequenceKV]) -> None:
    host["group_counts"][:] = 0
    for i, sequence in enumerate(sequences):
        host["group_tables"][i, : len(sequence.groups)] = sequence.groups
        host["group_counts"][i] = len(sequence.groups)


# Rounds of a draft.


def lay_out_round(buffers: Buffers, shape: RoundShape, requests: list[RoundRequest]) -> None:
    """Bring the inputs of a round to the device."""
    buffers.inputs.begin()
    host = buffers.inputs.host
    if shape.ruled:
        _lay_out_rules(host, shape, requests)
    if shape.branches > 1:
        _lay_out_branches(host, shape, requests)
    else:
        starts = [item.kv.length - (item.follows.judged if item.follows else 0) for item in requests]
        lay_out_rows(host, [(item.kv, item.tokens) for item in requests], starts=starts)
        if "state_windows" in host:
            lay_out_windows(host, requests, starts)
    _lay_out_sampling(host, shape, requests)
    if shape.announces:
        _lay_out_announced(host, requests)
    if shape.chained:
        _lay_out_outcomes(host, requests)
    else:
        _lay_out_numbers(host, shape, requests)
    buffers.inputs.send()


def _lay_out_sampling(host: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest]) -> None:
    """Write how the tokens of each branch are drawn."""
    host["temperature"][:], host["top_p"][:], host["least"][:] = 0, 1, 0
    for i, item in enumerate(requests):
        rows = slice(i * shape.branches, (i + 1) * shape.branches)
        host["temperature"][rows], host["top_p"][rows] = item.temperature, item.top_p
        host["least"][rows] = item.min_p
        if item.top_k:
            host["least"][rows, item.top_k :] = 2  # which no token has


def _lay_out_announced(host: dict[str, np.ndarray], requests: list[RoundRequest]) -> None:
    """Write the blocks that each sequence's last announcement had, from which the next one differs."""
    for i, item in enumerate(requests):
        if item.announce is not None:
            host["announced"][i] = 0
            if item.announce.before is not None:
                host["announced"][i, :, : item.announce.before.shape[1]] = item.announce.before.view(np.int64)


def _lay_out_numbers(host: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest]) -> None:
    """Write what rounds draw with and where they announce."""
    if shape.branches == 1:
        host["uniforms"][:] = 0
        for i, item in enumerate(requests):
            host["uniforms"][:, i] = item.uniforms[: len(host["uniforms"])]
    if shape.announces:
        host["limits"][:] = 0
        for i, item in enumerate(requests):
            _lay_out_announcement(host["limits"][:, i], host["words"][i : i + 1], item.announce)


def _lay_out_outcomes(host: dict[str, np.ndarray], requests: list[RoundRequest]) -> None:
    """Write the same for each number of tokens that a step before may accept; 0 for rounds that follow none."""
    host["follows"][:], host["judged"][:] = -1, 0
    if "all_limits" in host:
        host["all_limits"][:] = 0
    for i, item in enumerate(requests):
        uniforms, announce = item.uniforms, [item.announce]
        if item.follows is not None:
            host["follows"][i], host["judged"][i] = item.follows.row, item.follows.judged
            host["all_previous"][: len(item.follows.previous), i] = item.follows.previous
            uniforms, announce = item.follows.uniforms, item.follows.announce
        if item.temperature > 0:
            uniforms = uniforms[: host["all_uniforms"].shape[1]]
            host["all_uniforms"][i, : len(uniforms)] = uniforms
        for accepted, each in enumerate(announce):
            if each is not None:
                words = host["all_words"][accepted, i : i + 1]
                _lay_out_announcement(host["all_limits"][accepted, :, i], words, each)


def _lay_out_announcement(limits: np.ndarray, words: np.ndarray, announce: AnnouncementRequest | None) -> None:
    if announce is not None:
        limits[:] = announce.first, announce.last, max(0, announce.count)
        words[:] = announce.words


def _lay_out_rules(host: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest]) -> None:
    """Write the penalties, and the tokens that each branch begins with beyond the committed ones."""
    host["penalties"][:] = np.array([1, 0, 0])[:, None]
    host["guessed"][:] = -1
    for i, item in enumerate(requests):
        if item.rules is None:
            continue
        sampling, first = item.rules.session.sampling, i * shape.branches
        penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        host["penalties"][:, first : first + shape.branches] = np.array(penalties)[:, None]
        for row, tokens in enumerate(item.rules.guessed, first):
            host["guessed"][row, : len(tokens)] = tokens


def bring_rules(buffers: Buffers, requests: list[RoundRequest]) -> None:
    """Before a round: bring the biases and counts of sessions with rules."""
    if "rules" not in buffers.tensors:
        return
    rules = buffers.tensors["rules"]
    for i, item in enumerate(requests):
        if item.rules is None:
            rules[:, i] = 0
        else:
            rules[0, i], rules[1:, i] = item.rules.session.update(item.rules.committed, rules.shape[2], rules.device)


def _lay_out_branches(host: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest]) -> None:
    """Write where branches leave their sequences, where their KV goes, and which KV is moved before."""
    lay_out_rows(host, [(item.kv, []) for item in requests])
    for name in ("before", "own", "kept_own", "totals"):
        host[name][:] = 0
    host["source"][:] = host["target"][:] = -1
    passes, movable = len(host["uniforms"]), len(host["source"]) // shape.sequences
    for i, item in enumerate(requests):
        branches = item.branches or (Branch(item.kv.length, item.tokens[0], item.uniforms),)
        rows, count = slice(i * shape.branches, (i + 1) * shape.branches), len(branches)
        # A sequence with fewer branches runs its first one again, and writes no KV of it.
        order = [*range(count), *[0] * (shape.branches - count)]
        filled = [branches[index] for index in order]
        host["token_ids"][rows] = [branch.token for branch in filled]
        host["before"][rows] = [branch.length for branch in filled]
        host["own"][rows] = item.kv.length + passes * np.array(order)
        host["kept_own"][rows] = np.arange(shape.branches) < count
        if item.temperature > 0:
            host["uniforms"][:, rows] = np.stack([branch.uniforms for branch in filled], 1)
        host["lengths"][i] = item.kv.length + 1
        host["totals"][i] = item.kv.length + count * passes
        if item.moved is not None:
            here, table = slice(i * movable, i * movable + item.moved.count), item.kv.table()
            steps = np.arange(item.moved.count)
            host["source"][here] = slots_of(table, item.moved.source + steps)
            host["target"][here] = slots_of(table, item.moved.target + steps)
