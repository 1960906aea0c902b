"""The buffers of passes and rounds: named tensors of fixed sizes, moved to the device by one copy and back by one."""

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.sampling.judging import verdict_layout
from specahead.engine.staging import Buffers, Layout, Staging
from specahead.engine.steps.device_chain import UNIFORMS
from specahead.engine.steps.layout import lay_out_rows
from specahead.engine.steps.requests import RoundSettings
from specahead.engine.steps.shapes import PassShape, RoundShape
from specahead.engine.steps.states import states_layout
from specahead.kernels.selection import WORD

# What inputs hold of sequences that are not there; all others are 0.
_NOBODY = dict.fromkeys(("indices", "follows", "draft_rows", "source", "target"), -1)


def make_buffers(
    shape: PassShape,
    kv: KVCache,
    memory: Tensor | None = None,
    logits_rows: int | None = None,
    reads_states: bool = False,
) -> Buffers:
    """Return the buffers of a pass, filled as for a pass without sequences.

    memory: [indices, rows, blocks] float32, for a shape that shares budgets out: the remembered weights of all
    sequences. For one that fetches what its layers choose: LastChoices.blocks. logits_rows: how many rows give logits,
    in a pass of its exact size that is not judged; None: a step's, by its shape. reads_states: whether rows read the
    states of a target, from its places in `state_slots`.

    The pass adds to the tensors: logits [logits rows, vocab]; where it shares out budgets, all_lists [sparse layers,
    sequences, kv_heads, blocks] int32 and all_counts [sparse layers, sequences, kv_heads] int32, of the KV heads of all
    ranks; and lists and counts, the same of this rank's heads. A step keeps its lists only if the host reads them.
    """
    layout = _rows_layout(shape.sequences, shape.rows, shape.pages) | _logits_layout(shape, logits_rows)
    if reads_states:
        layout["state_slots"] = (shape.rows,), torch.int64
    if kv.offloads and kv.page_means is not None:
        # Where mean keys lie. Block tables and slots may name GPU pages, which have other indices.
        layout["page_numbers"] = (shape.rows,), torch.int64
        layout["page_number_tables"] = (shape.sequences, shape.pages), torch.int32
    if shape.read.is_sparse:
        layout |= _budget_layout(shape, kv)
    of_sequence = (shape.sequences,), torch.int32
    if shape.read.groups:
        layout["group_tables"] = (shape.sequences, shape.read.groups), torch.int32
        layout["group_counts"] = of_sequence
    if shape.turn:
        layout |= {"follows": of_sequence, "judged": of_sequence}  # as kernels/advance_rows.py has them
    if shape.judges_drafts:
        layout |= {"draft_rows": of_sequence, "held": of_sequence}  # as kernels/copy_drafts.py has them
    if shape.alternatives:
        layout["visible"] = (shape.rows, 3), torch.int32
        layout["alternatives"] = (shape.sequences, shape.alternatives), torch.int32  # -1: there is none
        layout["alternative_counts"] = of_sequence
    if shape.read.fetches:
        layout["round"] = (1,), torch.int32  # of the residency tables
    if shape.fetches_chosen:
        layout["indices"] = of_sequence  # of LastChoices
    on_device = {name: layout.pop(name) for name in ("support_ids", "support_probs") if shape.drafts and name in layout}
    buffers = _made(layout, _results_layout(shape), kv.device)
    for name, (sizes, dtype) in on_device.items():
        buffers.tensors[name] = torch.zeros(sizes, dtype=dtype, device=kv.device)
    if memory is not None:
        buffers.tensors["last_choices" if shape.fetches_chosen else "memory"] = memory
    return buffers


def make_round_buffers(shape: RoundShape, settings: RoundSettings, vocab: int, device: torch.device) -> Buffers:
    """Return the buffers of a draft's round, filled as for a round without sessions.

    The caller adds to the tensors, where rules change logits, rules [3, sequences, vocab] float32, as `ChangedLogits`
    has them.
    """
    return _made(_round_layout(shape, settings, vocab), _round_results_layout(shape, settings, vocab), device)


def _made(layout: Layout, results: Layout, device: torch.device) -> Buffers:
    buffers = Buffers(Staging(layout, device), Staging(results, device))
    for name, value in _NOBODY.items():
        if name in layout:
            buffers.inputs.host[name][:] = value
    lay_out_rows(buffers.inputs.host, [])
    buffers.inputs.send()
    return buffers


def _rows_layout(sequences: int, rows: int, pages: int) -> Layout:
    """Lay out where the tokens of a pass come from and go to; the same for passes and rounds.

    slots: page * PAGE_SIZE + offset of each token, -1 where no token is. query_starts: the first row of each sequence.
    lengths: tokens with KV, those of the pass included.
    """
    of_rows, tables = ((rows,), torch.int64), ((sequences, pages), torch.int32)
    layout: Layout = dict.fromkeys(("token_ids", "positions", "slots"), of_rows)
    layout |= {
        "query_starts": ((sequences + 1,), torch.int32),
        "lengths": ((sequences,), torch.int32),
        "block_tables": tables,
    }
    return layout


def _budget_layout(shape: PassShape, kv: KVCache) -> Layout:
    """Lay out what decides over the blocks of a shared budget (SharedBudget); rows are (sparse layer, KV head).

    indices: where each sequence's memory is; -1: no sequence. blocks: how many each sequence has.
    """
    rows = len(shape.sparse_layers(kv.num_layers)) * kv.all_kv_heads
    numbers: Layout = dict.fromkeys(("indices", "first", "last", "blocks", "room"), ((shape.sequences,), torch.int32))
    return numbers | {
        "bitmaps": ((shape.sequences, rows, -(-shape.blocks // WORD)), torch.int64),
        "importance": ((rows,), torch.float32),
    }


def _logits_layout(shape: PassShape, logits_rows: int | None) -> Layout:
    """Lay out which rows give logits and how they are judged."""
    layout: Layout = {}
    if shape.judge is not None:
        layout |= verdict_layout(shape.sequences, shape.queries - 1, shape.judge.support, shape.judge.cuts)
        if shape.drafts and shape.judge.support:
            layout["draft_uniforms"] = (shape.sequences, shape.drafts), torch.float64
        for name, of_all in UNIFORMS.items():
            if shape.turn and shape.drafts and name in layout:
                (rows, columns), dtype = layout.pop(name)
                layout[of_all] = (rows, columns + shape.drafts), dtype
        logits_rows = shape.sequences * (shape.queries + shape.alternatives)
    elif not shape.gives_logits:
        logits_rows = 0
    if logits_rows is not None:
        layout["logits_rows"] = (logits_rows,), torch.int64
    return layout


def _results_layout(shape: PassShape) -> Layout:
    of_sequence = (shape.sequences,), torch.int32
    layout: Layout = {}
    if shape.read.is_sparse:
        layout["blocks_read"] = of_sequence
    if shape.judge is not None:
        layout |= {"accepted": of_sequence, "following": of_sequence}
        layout["largest"] = (shape.sequences, shape.queries), torch.float32  # logits
    if shape.alternatives:
        layout["alternative"] = of_sequence
    if shape.drafts:
        layout["drafted"] = (shape.sequences, shape.drafts), torch.int32
    if shape.read.fetches:  # for KVCache.count_step
        layout |= dict.fromkeys(("listed", "fetched", "overflow"), ((1,), torch.int32))
        layout["missed"] = of_sequence
    return layout


# Rounds of a draft.


def _round_layout(shape: RoundShape, settings: RoundSettings, vocab: int) -> Layout:
    """Lay out what a round needs to know.

    least: the share of the likeliest token's probability that the others, in falling order, need to be drawn. limits:
    of AnnouncementRequest. announced: blocks announced last round, a bit each; words: of a row of them.
    """
    count, rows = shape.sequences, shape.rows
    layout = _rows_layout(count, max(rows, count * shape.queries), shape.pages) | {
        "temperature": ((rows,), torch.float32),
        "top_p": ((rows,), torch.float32),
        "least": ((rows, min(settings.support, vocab)), torch.float32),
        "uniforms": ((settings.passes(shape.gamma), rows), torch.float64),
    }
    if shape.branches > 1:
        layout |= _branches_layout(shape, settings)
    if shape.announces:
        layout["announced"] = _bitmaps(shape, settings)
        layout |= {"limits": ((3, count), torch.int32), "words": ((count,), torch.int32)}
    if shape.chained:
        layout = _with_outcomes(layout, shape, settings)
    if settings.reads_states:
        layout |= states_layout(shape, settings.gamma)
    if shape.ruled:  # see ChangedLogits
        layout["penalties"] = (3, rows), torch.float32
        # They were drafted in a round of its own, which may have had more passes.
        layout["guessed"] = (rows, settings.gamma + 1), torch.int32
    return layout


def _branches_layout(shape: RoundShape, settings: RoundSettings) -> Layout:
    """Lay out where branches stand.

    before: tokens of its sequence that each branch sees, and the position of its first token. own: where the KV of its
    own tokens begins. kept_own: whether these are written (a sequence with fewer branches repeats its first one).
    totals: tokens of a sequence once the round has run. source, target: where KV is moved from and to before anything
    is read, as places in the pages, -1 for none.
    """
    count = shape.sequences
    layout: Layout = dict.fromkeys(("before", "own", "kept_own"), ((shape.rows,), torch.int32))
    # What is moved was drafted in a round of its own, which may have had more passes.
    layout |= dict.fromkeys(("source", "target"), ((count * (settings.gamma + 1),), torch.int64))
    return layout | {"totals": ((count,), torch.int32)}


def _with_outcomes(layout: Layout, shape: RoundShape, settings: RoundSettings) -> Layout:
    """Return the layout with numbers for each number of tokens that a step which still runs may accept, 0 first.

    all_uniforms: of all positions at which a token may stand. all_previous: the token before the one that the step
    adds. follows, judged: as kernels/advance_rows.py has them.
    """
    count, outcomes = shape.sequences, settings.gamma + 1
    layout = dict(layout)
    (passes, _), dtype = layout.pop("uniforms")
    layout["all_uniforms"] = (count, passes + settings.gamma), dtype
    layout["all_previous"] = (outcomes, count), torch.int64
    layout |= dict.fromkeys(("follows", "judged"), ((count,), torch.int32))
    if shape.announces:
        (numbers, dtype), of_words = layout.pop("limits"), layout.pop("words")
        layout["all_limits"] = (outcomes, *numbers), dtype
        layout["all_words"] = (outcomes, *of_words[0]), dtype
    return layout


def _round_results_layout(shape: RoundShape, settings: RoundSettings, vocab: int) -> Layout:
    """Lay out what a round leaves.

    bitmaps: blocks to announce, a bit each; their difference to `announced` is in flags, values, value_counts and
    checksums (`code_difference`). began: as DeviceChain.follow_step_in_round has it.
    """
    count, of_tokens = shape.sequences, (settings.passes(shape.gamma), shape.rows)
    results: Layout = {"tokens": (of_tokens, torch.int32)}
    if settings.alternatives:
        results["alternatives"] = (*of_tokens, settings.alternatives), torch.int32
    if shape.sampled:
        support = min(settings.support, vocab)
        results["ids"] = (*of_tokens, support), torch.int32
        results["probs"] = (*of_tokens, support), torch.float32
    if shape.announces:
        (_, rows, words), _ = results["bitmaps"] = _bitmaps(shape, settings)
        results["flags"] = (count, rows, words), torch.uint8
        results["values"] = (count, rows * words * 8), torch.uint8
        results["value_counts"], results["checksums"] = ((count,), torch.int32), ((count,), torch.int64)
    if shape.chained:
        results["began"] = (3, count), torch.int32
    return results


def _bitmaps(shape: RoundShape, settings: RoundSettings) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the sizes of blocks of all sequences, a bit each."""
    assert settings.announcer is not None
    rows = len(settings.announcer.heads)
    return (shape.sequences, rows, -(-shape.blocks(settings.block_size) // WORD)), torch.int64
