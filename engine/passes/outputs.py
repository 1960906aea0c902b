"""From the buffers that a pass has left to what each of its sequences gets."""

import numpy as np
import torch
from torch import Tensor

from engine.inputs import SequenceInput, SequenceOutput
from engine.kv.cache import KVCache
from engine.passes.buffers import PassBuffers
from engine.passes.shape import PassShape


def read_outputs(
    buffers: PassBuffers, shape: PassShape, inputs: list[SequenceInput], kv: KVCache, results: dict[str, np.ndarray]
) -> list[SequenceOutput]:
    """Return what each input asked for, copied out of the buffers, and advance the lengths of their KV.

    results: of the buffers, once they are on the host.
    """
    for item in inputs:
        item.kv.length += len(item.tokens)
    outputs = [SequenceOutput() for _ in inputs]
    for i, output in enumerate(outputs):
        if "blocks_read" in results:
            output.blocks_read = int(results["blocks_read"][i])
        if shape.judged:
            output.verdict = int(results["accepted"][i]), int(results["following"][i])
        if shape.fetches:
            output.tokens_fetched = int(results["missed"][i]) * shape.block_size
    if not shape.judged:
        _give_logits(buffers, inputs, outputs)
    for i, (item, output) in enumerate(zip(inputs, outputs, strict=True)):
        blocks = -(-item.kv.length // shape.block_size) if shape.block_size else 0
        if shape.emitting:
            assert buffers.block_weights is not None
            output.block_weights = torch.stack([w[i, :, :, :blocks] for w in buffers.block_weights.by_layer])
        if item.read is not None and item.read.emit_weights and shape.decay is None:
            assert buffers.read_weights is not None
            output.read_weights = _by_layer(buffers, shape, kv, i, blocks, buffers.read_weights[:, i], 0.0)
        if item.read is not None and item.read.report_blocks:
            assert buffers.lists is not None
            ones = torch.ones_like(buffers.lists[:, i], dtype=torch.float32)
            output.blocks = _by_layer(buffers, shape, kv, i, blocks, ones, 1.0) > 0
    return outputs


def _give_logits(buffers: PassBuffers, inputs: list[SequenceInput], outputs: list[SequenceOutput]) -> None:
    """Logits stand in rows of their own where only some rows give them, else in the rows of all tokens."""
    assert buffers.logits is not None
    row = 0
    for item, output in zip(inputs, outputs, strict=True):
        count = {"none": 0, "last": 1}.get(item.logits, len(item.tokens))
        if buffers.logits_rows is None:
            first = row + len(item.tokens) - count
            row += len(item.tokens)
        else:
            first = row
            row += count
        if count:
            logits = buffers.logits[first : first + count]
            output.logits = logits.clone() if logits.dtype == torch.float32 else logits.float()


def _by_layer(
    buffers: PassBuffers, shape: PassShape, kv: KVCache, sequence: int, blocks: int, values: Tensor, of_dense: float
) -> Tensor:
    """Spread the values of listed blocks [sparse layers, kv_heads, width], on the CPU: [layers, kv_heads, blocks]."""
    assert buffers.lists is not None and buffers.counts is not None
    lists, counts = buffers.lists[:, sequence], buffers.counts[:, sequence]
    listed = torch.arange(lists.shape[-1], device=lists.device) < counts[..., None]
    spread = torch.zeros(*counts.shape, blocks + 1, device=lists.device)
    spread.scatter_add_(2, lists.where(listed, blocks).long().clamp(max=blocks), values.where(listed, 0.0))
    out = torch.full((kv.num_layers, kv.kv_heads, blocks), of_dense)
    sparse = [layer for layer in range(kv.num_layers) if layer not in shape.dense_layers]
    out[sparse] = spread[..., :blocks].cpu()
    return out
