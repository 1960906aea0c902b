"""Passes over one sequence whose layers attend by a function of the caller's."""

import numpy as np
import torch

from engine.decoder import Attend
from engine.inputs import SequenceInput, SequenceOutput
from engine.kv.pages import PAGE_SIZE
from engine.model_runner import ModelRunner


@torch.inference_mode()
def forward_attending(runner: ModelRunner, item: SequenceInput, attend: Attend) -> SequenceOutput:
    """Run one sequence by `attend`, over what lies in the KV's own pages, and return the logits of all its tokens.

    For methods that look at a layer's queries before they choose. item.read must be None.
    """
    item.check()
    kv = runner.kv
    kv.begin_pass([(item.kv, len(item.tokens))])
    at = np.arange(item.kv.length, item.kv.length + len(item.tokens))
    slots = item.kv.table()[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
    ids, positions, written = (torch.as_tensor(each, device=runner.device) for each in (item.tokens, at, slots))
    logits = runner.decoder.run(ids, positions, written, kv.k_pages, kv.v_pages, attend)
    item.kv.length += len(item.tokens)
    return SequenceOutput(logits=logits.float())
