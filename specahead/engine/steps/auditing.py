"""Audits: what a sparse pass says of the next tokens, compared with what a dense pass says of the same ones.

An audited sequence first runs sparsely in the pass of the other sparse ones, where it would run in any case. Then it
runs again and reads everything: that pass writes the KV of its tokens anew and gives the verdict. The logits of the
first pass stay on the device until then, and what the comparison gives reaches the host with the verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specahead.engine.sampling.divergence import divergence
from specahead.engine.staging import Buffers
from specahead.engine.steps.alternatives import drafted_logits
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.shapes import PassShape


def run_audited(
    inputs: list[SequenceInput], forward: Callable[[list[SequenceInput]], list[SequenceOutput]]
) -> list[SequenceOutput]:
    """Run inputs, and the audited ones among them twice. forward: runs inputs in as many passes as they need."""
    audited = [i for i, item in enumerate(inputs) if item.audit is not None]
    outputs = forward([_sparsely(item) for item in inputs])
    for i in audited:
        inputs[i].kv.length -= len(inputs[i].tokens)
    for i, output in zip(audited, forward([inputs[i] for i in audited]), strict=True):
        output.tokens_fetched += outputs[i].tokens_fetched
        outputs[i] = output
    return outputs


def _sparsely(item: SequenceInput) -> SequenceInput:
    """Return the input as it runs in the first pass, whose verdict does not count."""
    if item.audit is None:
        return item
    assert item.read is None and item.drafted is not None
    return replace(item, read=item.audit.read, drafted=replace(item.drafted, rules=(), logprobs=None))


def compare(buffers: Buffers, shape: PassShape, inputs: Sequence[SequenceInput]) -> list[tuple[int, Tensor]]:
    """Keep the logits of audited inputs that read sparsely in this pass; compare those of the others. Launches only.

    buffers: those of the pass, with its logits. Returns the index of each input that was compared, and its rows as
    `divergence` gives them, which are on their way to the host.
    """
    members = [i for i, item in enumerate(inputs) if item.audit is not None]
    if not members:
        return []
    by_sequence = drafted_logits(buffers.tensors["logits"], shape)
    rows = torch.cat([by_sequence[i, : inputs[i].logits_rows] for i in members])
    audits, counts = [inputs[i].audit for i in members], [inputs[i].logits_rows for i in members]
    if inputs[members[0]].read is not None:  # inputs of one pass all read sparsely, or all read everything
        for audit, own in zip(audits, rows.split(counts), strict=True):
            assert audit is not None
            audit.logits = own
        return []
    before = torch.cat([audit.logits for audit in audits if audit is not None and audit.logits is not None])
    found = divergence(before, rows).to("cpu", non_blocking=True)
    return list(zip(members, found.split(counts), strict=True))
