"""From the buffers that a pass has left to what each of its sequences gets."""

import itertools

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.sampling.distributions import Support
from specahead.engine.sampling.judging import judge_by_rules
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.passes.alternatives import drafted_logits
from specahead.engine.steps.passes.shape import PassShape
from specahead.engine.steps.staging import Buffers, Staging


class StepUnderWay:
    """A step that has been launched and not been waited for. results: where it leaves verdicts.

    inputs: what it runs. done: comes when it has ended; None: it has.
    """

    def __init__(self, results: Staging, inputs: list[SequenceInput], done: torch.cuda.Event | None) -> None:
        self._results, self._inputs, self._done = results, inputs, done

    def left(self) -> dict[str, Tensor]:
        """Return the verdicts that the step leaves on the device: accepted and following, int32 [sequences] each, and
        where alternatives ran, alternative: the last accepted token if it is one, else -1.
        """
        names = [name for name in ("accepted", "following", "alternative") if name in self._results.device]
        return {name: self._results.device[name][: len(self._inputs)] for name in names}

    def outputs(self) -> list[SequenceOutput]:
        """Wait for the step and return what it gave each sequence. To be called once, before the next but one."""
        if self._done is not None:
            self._done.synchronize()
        results = self._results.host
        outputs = read_verdicts(results, len(self._inputs))
        for output, read in zip(outputs, results.get("blocks_read", ()), strict=False):
            output.blocks_read = int(read)
        for output, token in zip(outputs, results.get("alternative", ()), strict=False):
            output.alternative = int(token) if token >= 0 else None
        if "drafted" in results:
            _tell_drafted(self._inputs, results["drafted"])
        return outputs


def read_outputs(
    buffers: Buffers, shape: PassShape, inputs: list[SequenceInput], kv: KVCache, results: dict[str, np.ndarray]
) -> list[SequenceOutput]:
    """Return what each input asked for, copied out of the buffers, and advance the lengths of their KV.

    results: of the buffers, once they are on the host. Of passes that only draft the outputs say what was fetched, and
    lengths stay: the pass that judges writes this KV again.
    """
    outputs = read_verdicts(results, len(inputs)) if shape.judged else [SequenceOutput() for _ in inputs]
    for i, output in enumerate(outputs):
        if "blocks_read" in results:
            output.blocks_read = int(results["blocks_read"][i])
        if shape.fetches:
            output.tokens_fetched = int(results["missed"][i]) * shape.block_size
    if shape.drafts:
        _tell_drafted(inputs, results["drafted"])
        _tell_supports(buffers, shape, inputs)
    if shape.drafts_alone:
        return outputs
    for item in inputs:
        item.kv.length += item.rows
    if shape.judged:
        _judge_by_rules(buffers, shape, inputs, outputs)
    else:
        _give_logits(buffers, inputs, outputs)
    for i, (item, output) in enumerate(zip(inputs, outputs, strict=True)):
        blocks = -(-item.kv.length // shape.block_size) if shape.block_size else 0
        if item.read is not None and item.read.emit_weights and shape.decay is None:
            output.read_weights = _by_layer(buffers, shape, kv, i, blocks, buffers.tensors["read_weights"][:, i], 0.0)
        if item.read is not None and item.read.report_blocks and (shape.decay is None or shape.shares_out):
            ones = torch.ones_like(buffers.tensors["lists"][:, i], dtype=torch.float32)
            output.blocks = _by_layer(buffers, shape, kv, i, blocks, ones, 1.0) > 0
    return outputs


def read_verdicts(results: dict[str, np.ndarray], count: int) -> list[SequenceOutput]:
    """Return the verdicts of the first `count` sequences of a pass."""
    every = zip(results["accepted"].tolist(), results["following"].tolist(), results["finite"].tolist(), strict=True)
    return [
        SequenceOutput(verdict=(accepted, following), finite=bool(finite))
        for accepted, following, finite in itertools.islice(every, count)
    ]


def _tell_drafted(inputs: list[SequenceInput], tokens: np.ndarray) -> None:
    """Put what was drafted, [sequences, drafted] int32, in the place of the inputs' tokens."""
    for item, drafted in zip(inputs, tokens.tolist(), strict=False):
        assert item.drafted is not None
        item.tokens[1:] = item.drafted.tokens[:] = drafted


def _tell_supports(buffers: Buffers, shape: PassShape, inputs: list[SequenceInput]) -> None:
    """Tell what drafted tokens were drawn from, of the inputs that the host or another pass is to judge."""
    for i, item in enumerate(inputs):
        assert item.drafted is not None
        if (shape.drafts_alone or not item.drafted.is_plain) and not item.drafted.sampling.greedy:
            ids, probs = (buffers.tensors[name][i].cpu().numpy() for name in ("support_ids", "support_probs"))
            of_tokens = zip(ids[: shape.drafts], probs[: shape.drafts], strict=True)
            item.drafted.supports[:] = [Support(*of_token) for of_token in of_tokens]


def _give_logits(buffers: Buffers, inputs: list[SequenceInput], outputs: list[SequenceOutput]) -> None:
    """Logits stand in rows of their own where only some rows give them, else in the rows of all tokens."""
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
    """Put what rules decide in place of the verdicts that the pass ended in, of the inputs that are not plain."""
    ruled = [(i, item.drafted) for i, item in enumerate(inputs) if item.drafted and not item.drafted.is_plain]
    if not ruled:
        return
    logits = drafted_logits(buffers.tensors["logits"], shape)[[i for i, _ in ruled]]
    judged = judge_by_rules(logits, [drafted for _, drafted in ruled], whatever_is_drafted=shape.draws_own)
    for (i, _), item in zip(ruled, judged, strict=True):
        outputs[i].verdict, outputs[i].logprobs, outputs[i].supports = item.verdict, item.logprobs, item.supports
        outputs[i].finite &= item.finite


def _by_layer(
    buffers: Buffers, shape: PassShape, kv: KVCache, sequence: int, blocks: int, values: Tensor, of_dense: float
) -> Tensor:
    """Spread the values of listed blocks [sparse layers, kv_heads, width], on the CPU: [layers, kv_heads, blocks]."""
    lists, counts = buffers.tensors["lists"][:, sequence], buffers.tensors["counts"][:, sequence]
    listed = torch.arange(lists.shape[-1], device=lists.device) < counts[..., None]
    spread = torch.zeros(*counts.shape, blocks + 1, device=lists.device)
    spread.scatter_add_(2, lists.where(listed, blocks).long().clamp(max=blocks), values.where(listed, 0.0))
    out = torch.full((kv.num_layers, kv.kv_heads, blocks), of_dense)
    out[shape.sparse_layers(kv.num_layers)] = spread[..., :blocks].cpu()
    return out
