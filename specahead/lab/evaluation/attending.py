"""Passes over one sequence whose layers attend by a function of the caller's."""

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.model.decoder import Attend, PassTokens
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.backends import default_backend
from specahead.kernels.paged_attention import Batch, paged_attention, weights_of_last_queries


@torch.inference_mode()
def forward_attending(runner: ModelRunner, sequence: SequenceKV, tokens: list[int], attend: Attend) -> Tensor:
    """Run tokens behind a sequence by `attend`, over what lies in the KV's own pages; write their KV.

    Returns the logits of all tokens [tokens, vocab] float32. For methods that look at a layer's queries
    before they choose, and for weights on blocks. Raises OutOfPages before anything has changed.
    """
    kv = runner.kv
    kv.begin_pass([(sequence, len(tokens))])
    at = np.arange(sequence.length, sequence.length + len(tokens))
    slots = sequence.table()[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
    ids, positions, written = (torch.as_tensor(each, device=runner.device) for each in (tokens, at, slots))
    logits = runner.decoder.run(PassTokens(ids, positions, written), kv, attend)
    sequence.length += len(tokens)
    return logits.float()


def forward_weighing(
    runner: ModelRunner, sequence: SequenceKV, tokens: list[int], block_size: int, emitting: int
) -> tuple[Tensor, Tensor]:
    """Run tokens behind a sequence densely, and let the last `emitting` of them give their weights on blocks.

    Returns the logits of all tokens [tokens, vocab] float32, and the weights [layers, emitting, heads, blocks] float32.
    """
    length, device, given = sequence.length + len(tokens), runner.device, list[Tensor]()
    lengths, starts = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([length], [0, len(tokens)]))

    def attend(layer: int, queries: Tensor) -> Tensor:
        table = torch.from_numpy(sequence.table()).to(device)[None]
        pages, scale = runner.kv.layer_pages(layer), runner.decoder.attention_scale
        batch = Batch(queries, *pages, table, lengths, starts, scale, len(tokens), scales=runner.kv.scales_of(layer))
        given.append(weights_of_last_queries(batch, block_size, emitting)[0])
        return paged_attention(batch, backend=default_backend(device))

    return forward_attending(runner, sequence, tokens, attend), torch.stack(given)
