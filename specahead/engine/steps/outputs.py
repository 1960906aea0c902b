"""From the results of passes and of rounds to the outputs of their sequences."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.sampling.distributions import Support
from specahead.engine.sampling.judging import RuledVerdict, judge_by_rules
from specahead.engine.staging import Buffers
from specahead.engine.steps.alternatives import drafted_logits
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.requests import CodedBitmap, DraftedTokens, RoundOutput, RoundRequest, RoundSettings
from specahead.engine.steps.shapes import PassShape, RoundShape
from specahead.kernels.paged_attention import BlockLists

_OF_SEQUENCES = "accepted", "following", "blocks_read", "alternative", "drafted"  # results of a pass
Output = TypeVar("Output")


# Waits for a launched step and returns its outputs. Call it once, before the step after the next one is launched.
StepUnderWay = Callable[[], list[SequenceOutput]]


@dataclass(frozen=True)
class RoundsUnderWay:
    """Rounds that were launched."""

    of_one_branch: bool
    """Whether all are drafted together, each after the tokens that there are: then a step may judge them."""
    outputs: Callable[[], list[RoundOutput]]
    """Waits for the rounds and returns what they give, in the order of the requests: before the next are launched."""

    @staticmethod
    def finished(given: list[RoundOutput]) -> "RoundsUnderWay":
        """Return rounds that ran at once."""
        return RoundsUnderWay(all(len(output.branches) == 1 for output in given), lambda: given)


def in_order(parts: Iterable[tuple[list[int], list[Output]]]) -> list[Output]:
    """Return outputs in the order of their places, which stand beside the outputs of each part."""
    outputs: dict[int, Output] = {}
    for places, given in parts:
        outputs.update(zip(places, given, strict=True))
    return [outputs[i] for i in range(len(outputs))]


def read_outputs(
    buffers: Buffers, shape: PassShape, inputs: list[SequenceInput], kv: KVCache, results: dict[str, np.ndarray]
) -> list[SequenceOutput]:
    """Return what each input asked for, copied out of the buffers, and advance the lengths of their KV.

    results: those of the buffers, on the host. A pass that only drafts leaves the lengths as they are, because the pass
    that judges writes this KV again.
    """
    outputs = read_results(results, inputs)
    if shape.read.fetches:
        for output, missed in zip(outputs, results["missed"].tolist(), strict=False):
            output.tokens_fetched = missed * PAGE_SIZE
    if shape.drafts:
        _take_supports(buffers, shape, inputs)
    if shape.drafts_alone:
        return outputs
    for item in inputs:
        item.kv.length += item.rows
    if shape.judge:
        _judge_by_rules(buffers, shape, inputs, outputs)
    else:
        _give_logits(buffers, inputs, outputs)
        _judge_ends_of_prompts(inputs, outputs, draws_own=shape.pinned)
    for i, (item, output) in enumerate(zip(inputs, outputs, strict=True)):
        if item.read is not None and item.read.report_blocks and shape.shares_out:
            output.blocks = _blocks_of(buffers, shape, kv, i, -(-item.kv.length // shape.read.block_size))
    return outputs


def read_results(results: dict[str, np.ndarray], inputs: list[SequenceInput]) -> list[SequenceOutput]:
    """Return the outputs that the results of a pass hold, and put drafted tokens in place of the inputs' own."""
    given = {name: results[name].tolist() for name in _OF_SEQUENCES if name in results}
    if "accepted" in results:  # of each row up to the one that gives the token after those accepted
        largest = np.isfinite(results["largest"])
        finite = (largest | (np.arange(largest.shape[1]) > results["accepted"][:, None])).all(1).tolist()
    outputs = [SequenceOutput() for _ in inputs]
    for i, (item, output) in enumerate(zip(inputs, outputs, strict=True)):
        if "accepted" in given:
            accepted, following = given["accepted"][i], given["following"][i]
            output.verdict = accepted, following
            output.finite = finite[i]
        if "blocks_read" in given:
            output.blocks_read = given["blocks_read"][i]
        if "alternative" in given and given["alternative"][i] >= 0:
            output.alternative = given["alternative"][i]
        if "drafted" in given:
            assert item.drafted is not None
            item.tokens[1:] = item.drafted.tokens[:] = given["drafted"][i]
    return outputs


def _take_supports(buffers: Buffers, shape: PassShape, inputs: list[SequenceInput]) -> None:
    """Give inputs the distributions of their drafted tokens, if the host or another pass judges these."""
    for i, item in enumerate(inputs):
        assert item.drafted is not None
        if (shape.drafts_alone or not item.drafted.is_plain) and not item.drafted.sampling.greedy:
            ids, probs = (buffers.tensors[name][i].cpu().numpy() for name in ("support_ids", "support_probs"))
            of_tokens = zip(ids[: shape.drafts], probs[: shape.drafts], strict=True)
            item.drafted.supports[:] = [Support(*of_token) for of_token in of_tokens]


def _give_logits(buffers: Buffers, inputs: list[SequenceInput], outputs: list[SequenceOutput]) -> None:
    """Give outputs their logits. Where only some rows give logits, these stand side by side, else in their own rows."""
    row, of_all = 0, "logits_rows" not in buffers.tensors
    for item, output in zip(inputs, outputs, strict=True):
        count = item.logits_rows
        row += len(item.tokens) if of_all else count
        if count:
            logits = buffers.tensors["logits"][row - count : row]
            output.logits = logits.clone() if logits.dtype == torch.float32 else logits.float()


def _judge_by_rules(
    buffers: Buffers, shape: PassShape, inputs: list[SequenceInput], outputs: list[SequenceOutput]
) -> None:
    """Judge inputs with rules on the host, and replace their verdicts."""
    ruled = [(i, item.drafted) for i, item in enumerate(inputs) if item.drafted and not item.drafted.is_plain]
    if not ruled:
        return
    assert shape.judge is not None
    logits = drafted_logits(buffers.tensors["logits"], shape)[[i for i, _ in ruled]]
    judged = judge_by_rules(logits, [drafted for _, drafted in ruled], draws_own=shape.judge.draws_own)
    for (i, _), given in zip(ruled, judged, strict=True):
        _take(outputs[i], given)


def _take(output: SequenceOutput, given: RuledVerdict) -> None:
    output.verdict, output.logprobs, output.supports = given.verdict, given.logprobs, given.supports
    output.finite &= given.finite


def _judge_ends_of_prompts(inputs: list[SequenceInput], outputs: list[SequenceOutput], draws_own: bool) -> None:
    """Judge inputs whose pass gave their logits, and put the verdicts in place of these."""
    ends = [(item.drafted, output) for item, output in zip(inputs, outputs, strict=True) if item.drafted is not None]
    if not ends:
        return
    logits = [output.logits for _, output in ends if output.logits is not None]
    judged = judge_by_rules(pad_sequence(logits, batch_first=True), [drafted for drafted, _ in ends], draws_own)
    for (_, output), given in zip(ends, judged, strict=True):
        output.logits = None
        _take(output, given)


def _blocks_of(buffers: Buffers, shape: PassShape, kv: KVCache, sequence: int, blocks: int) -> Tensor:
    """Return the blocks that a sequence has read, bool [layers, kv_heads, blocks]. Launches only."""
    lists, counts = (buffers.tensors[name][:, sequence] for name in ("all_lists", "all_counts"))
    out = torch.ones(kv.num_layers, kv.all_kv_heads, blocks, dtype=torch.bool, device=lists.device)
    masks = BlockLists(lists, counts, shape.read.block_size).as_mask(blocks)
    for layer, of_layer in zip(shape.sparse_layers(kv.num_layers), masks, strict=True):
        out[layer] = of_layer
    return out


# Rounds of a draft.


def read_round(
    results: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest], settings: RoundSettings
) -> list[RoundOutput]:
    """Return the results of a round, which are on the host, in the order of the requests."""
    outputs = []
    for i, item in enumerate(requests):
        first_row, count = i * shape.branches, max(1, len(item.branches))
        rows = range(first_row, first_row + count)
        branches = [_read_branch(results, row, item.temperature > 0, settings) for row in rows]
        announce, began, alternative = item.announce, None, None
        if item.follows is not None:
            accepted, following, other = results["began"][:, i].tolist()
            assert 0 <= accepted <= item.follows.judged, "the step accepted more tokens than it judged"
            announce, began = item.follows.announce[accepted], (accepted, following)
            alternative = other if other >= 0 else None
        bitmap, coded = None, None
        if announce is not None:
            bitmap = results["bitmaps"][i].view(np.uint64).copy()
            coded = _read_coded(results, i, announce.words)
        outputs.append(RoundOutput(branches, bitmap, coded, began, alternative))
    return outputs


def _read_branch(results: dict[str, np.ndarray], row: int, drawn: bool, settings: RoundSettings) -> DraftedTokens:
    """Return the tokens that were drafted in a row. drawn: whether they were drawn from distributions."""
    return DraftedTokens(
        tokens=results["tokens"][:, row].tolist(),
        ids=results["ids"][:, row].copy() if drawn else None,
        probs=results["probs"][:, row].copy() if drawn else None,
        alternatives=results["alternatives"][:, row].copy() if settings.alternatives else None,
        runs_last=settings.runs_last,
        reads_states=settings.reads_states,
    )


def _read_coded(results: dict[str, np.ndarray], sequence: int, words: int) -> CodedBitmap:
    """Return a sequence's announcement as the round has coded it. words: of a row."""
    flags = np.ascontiguousarray(results["flags"][sequence, :, :words])
    values = results["values"][sequence, : results["value_counts"][sequence]]
    return CodedBitmap(flags.tobytes() + values.tobytes(), int(results["checksums"][sequence]) % (1 << 64))
