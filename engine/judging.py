"""Which drafted tokens of which sequence are kept: rows of logits in, accepted counts and next tokens out."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling import USE_ACCEPT, USE_TARGET, Sampling, Support, uniforms
from engine.staging import Layout
from kernels.backends import Backend
from kernels.rejection import DraftedRows, judge_greedy, judge_sampled


@dataclass(frozen=True)
class Drafted:
    """What a pass judges: it runs one token more, before these. supports: one a token, or none (one-hot).

    base: the position of the first token.
    """

    tokens: list[int]
    supports: list[Support]
    sampling: Sampling
    base: int


def verdict_layout(rows: int, gamma: int, support: int) -> Layout:
    """Return the inputs of `judge` for up to so many rows of up to `gamma` tokens; support 0: all are greedy."""
    layout: Layout = {"draft_tokens": ((rows, gamma), torch.int32), "draft_counts": ((rows,), torch.int32)}
    if support:
        layout |= {
            "support_ids": ((rows, gamma, support), torch.int32),
            "support_probs": ((rows, gamma, support), torch.float32),
            "temperature": ((rows,), torch.float32),
            "top_p": ((rows,), torch.float32),
            "accept_uniforms": ((rows, gamma), torch.float64),
            "draw_uniforms": ((rows, gamma + 1), torch.float64),
        }
    return layout


def support_of(rounds: list[Drafted]) -> int:
    """Return the `support` that `verdict_layout` needs for these."""
    if all(item.sampling.greedy for item in rounds):
        return 0
    return max(1, *(len(support.ids) for item in rounds for support in item.supports), 1)


def lay_out_verdicts(arrays: Mapping[str, np.ndarray], rounds: list[Drafted]) -> None:
    """Write rounds into arrays of `verdict_layout`; rows behind them become empty greedy ones."""
    arrays["draft_counts"][:] = 0
    sampled = "temperature" in arrays
    if sampled:
        arrays["temperature"][:] = 0
        arrays["support_probs"][:] = 0
    for i, item in enumerate(rounds):
        n, sampling = len(item.tokens), item.sampling
        arrays["draft_counts"][i] = n
        arrays["draft_tokens"][i, :n] = item.tokens
        if not sampled or sampling.greedy:
            continue
        arrays["temperature"][i], arrays["top_p"][i] = sampling.temperature, sampling.top_p
        arrays["accept_uniforms"][i, :n] = uniforms(sampling.seed, item.base, n, USE_ACCEPT)
        arrays["draw_uniforms"][i, : n + 1] = uniforms(sampling.seed, item.base, n + 1, USE_TARGET)
        for j, support in enumerate(item.supports):
            arrays["support_ids"][i, j, : len(support.ids)] = support.ids
            arrays["support_probs"][i, j, : len(support.ids)] = support.probs
        if not item.supports:
            arrays["support_ids"][i, :n, 0] = item.tokens
            arrays["support_probs"][i, :n, 0] = 1


def judge(logits: Tensor, inputs: Mapping[str, Tensor], backend: Backend) -> tuple[Tensor, Tensor]:
    """Return accepted counts and next tokens, int32 [rows] each.

    logits: [rows, γ + 1, vocab]. inputs: the tensors of `verdict_layout`, and any others.
    """
    if "temperature" not in inputs:
        return judge_greedy(logits, inputs["draft_tokens"], inputs["draft_counts"], backend)
    return judge_sampled(logits, DraftedRows(**{name: inputs[name] for name in verdict_layout(0, 0, 1)}), backend)
