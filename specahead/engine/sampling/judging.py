"""Which drafted tokens of which sequence are kept: rows of logits in, accepted counts and next tokens out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specahead.engine.sampling.distributions import (
    USE_ACCEPT,
    USE_SCREEN_ACCEPT,
    USE_SCREEN_DRAW,
    USE_TARGET,
    Sampling,
    Support,
    uniforms,
)
from specahead.engine.sampling.logit_rules import LogitRule
from specahead.engine.steps.staging import Layout
from specahead.kernels.backends import Backend
from specahead.kernels.rejection import DraftedRows, accept_greedy, draw_own, judge_greedy, judge_sampled

WIDE_SUPPORT = 4096  # entries of a distribution of the model's own, so that next to nothing is cut off


@dataclass(frozen=True)
class Drafted:
    """What a pass judges: it runs one token more, before these. supports: one a token, or none (one-hot).

    base: the position of the first token. rules: what changes its logits, given `committed`, the tokens before base.
    logprobs: how many likely tokens to tell at each position with their log probabilities, beside the token's own;
    None: none, nor its own. screens: whether a later pass judges what this one leaves. Then sampled tokens are drawn by
    uniforms of their own, from the WIDE_SUPPORT likeliest, and the output tells what each was drawn from. foresees:
    whether that pass draws its own tokens, whatever was screened (a deterministic runner). Then this one draws by the
    same uniforms, so that both mostly draw the same token, and tells nothing.
    """

    tokens: list[int]
    supports: list[Support]
    sampling: Sampling
    base: int
    rules: tuple[LogitRule, ...] = ()
    committed: Sequence[int] = ()
    logprobs: int | None = None
    screens: bool = False
    foresees: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether `judge` alone knows how to judge it; else `specahead.engine.sampling.ruled_judging` does."""
        return not self.rules and self.logprobs is None and not self.tells_supports

    @property
    def tells_supports(self) -> bool:
        """Whether the output tells what the verdict's tokens were drawn from."""
        return self.screens and not self.foresees and not self.sampling.greedy


def verdict_layout(rows: int, gamma: int, support: int, cuts: int = 0) -> Layout:
    """Return the inputs of `judge` for up to so many rows of up to `gamma` tokens.

    support: entries of a draft's distribution, 0 if all rows are greedy. cuts: the largest top_k, as of `cuts_of`.
    """
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
    if cuts:
        layout |= {"top_k": ((rows,), torch.int32), "min_p": ((rows,), torch.float32)}
    return layout


def support_of(rounds: list[Drafted]) -> int:
    """Return the `support` that `verdict_layout` needs for these."""
    if all(item.sampling.greedy for item in rounds):
        return 0
    return max(1, *(len(support.ids) for item in rounds for support in item.supports), 1)


def cuts_of(rounds: list[Drafted]) -> int:
    """Return the `cuts` that `verdict_layout` needs for these: the largest top_k, 1 for min_p alone, 0 for neither."""
    return max((item.sampling.top_k or 1 for item in rounds if item.sampling.cuts), default=0)


def lay_out_verdicts(arrays: Mapping[str, np.ndarray], rounds: list[Drafted]) -> None:
    """Write rounds into arrays of `verdict_layout`; rows behind them become empty greedy ones."""
    arrays["draft_counts"][:] = 0
    sampled = "temperature" in arrays
    if sampled:
        arrays["temperature"][:] = 0
    if "support_probs" in arrays:
        arrays["support_probs"][:] = 0
    if "top_k" in arrays:
        arrays["top_k"][:] = arrays["min_p"][:] = 0
    for i, item in enumerate(rounds):
        n, sampling = len(item.tokens), item.sampling
        arrays["draft_counts"][i] = n
        arrays["draft_tokens"][i, :n] = item.tokens
        if not sampled or sampling.greedy:
            continue
        arrays["temperature"][i], arrays["top_p"][i] = sampling.temperature, sampling.top_p
        if "top_k" in arrays:
            arrays["top_k"][i], arrays["min_p"][i] = sampling.top_k, sampling.min_p
        accept, draw = (USE_SCREEN_ACCEPT, USE_SCREEN_DRAW) if item.tells_supports else (USE_ACCEPT, USE_TARGET)
        if "accept_uniforms" in arrays:  # else the position is known on the device alone
            arrays["accept_uniforms"][i, :n] = uniforms(sampling.seed, item.base, n, accept)
            arrays["draw_uniforms"][i, : n + 1] = uniforms(sampling.seed, item.base, n + 1, draw)
        if "support_ids" not in arrays:  # what was drafted on the device is there
            continue
        for j, support in enumerate(item.supports):
            arrays["support_ids"][i, j, : len(support.ids)] = support.ids
            arrays["support_probs"][i, j, : len(support.ids)] = support.probs
        if not item.supports:
            arrays["support_ids"][i, :n, 0] = item.tokens
            arrays["support_probs"][i, :n, 0] = 1


def judge(
    logits: Tensor, inputs: Mapping[str, Tensor], backend: Backend, whatever_is_drafted: bool = False, cuts: int = 0
) -> tuple[Tensor, Tensor]:
    """Return accepted counts and next tokens, int32 [rows] each.

    logits: [rows, γ + 1, vocab]. inputs: the tensors of `verdict_layout`, and any others. cuts: at least `cuts_of`
    these rounds, if that is not 0. whatever_is_drafted: whether
    the tokens must be those of plain decoding also where they are sampled. Then the target draws its own token at each
    position, and a drafted one is accepted if it is the same. That is as exact as the rule of speculative sampling,
    which accepts somewhat more, but whose tokens depend on those that were proposed.
    """
    if "temperature" not in inputs:
        return judge_greedy(logits, inputs["draft_tokens"], inputs["draft_counts"], backend)
    drafted = DraftedRows(**{name: inputs[name] for name in verdict_layout(0, 0, 1)})
    if cuts:
        logits = cut_logits(logits, inputs["temperature"], inputs["top_k"], inputs["min_p"], cuts)
    if not whatever_is_drafted:
        return judge_sampled(logits, drafted, backend)
    own = _draw_own(logits, drafted, backend)
    accepted, following = accept_greedy(drafted.draft_tokens.long(), drafted.draft_counts.long(), own)
    return accepted.int(), following.int()


def cut_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, min_p: Tensor, most: int) -> Tensor:
    """Return logits with -inf in place of what top_k and min_p leave out; of entries as likely as the last one left all
    are left.

    logits: [rows, places, vocab]. temperature, min_p: [rows] float32; top_k: [rows] int32, at most `most`, 0 for all.
    """
    best = logits.topk(min(most, logits.shape[-1])).values.float()  # [rows, places, most]
    last = (top_k.long().clamp(1, best.shape[-1]) - 1)[:, None, None].expand(-1, best.shape[1], 1)
    least = best.gather(2, last).where(top_k[:, None, None] > 0, -torch.inf)
    # p >= min_p of the largest p, at this temperature.
    reach = (temperature * min_p.log()).where(min_p > 0, -torch.inf)[:, None, None]
    least = torch.maximum(least, best[..., :1] + reach)
    return logits.masked_fill(logits < least, -torch.inf)


def _draw_own(logits: Tensor, drafted: DraftedRows, backend: Backend) -> Tensor:
    """Return the tokens that the target draws by itself, int64 [rows, γ + 1]; each position is a row of its own."""
    rows, places, _ = logits.shape
    temperature, top_p = (each.repeat_interleave(places) for each in (drafted.temperature, drafted.top_p))
    drawn = draw_own(logits.flatten(0, 1), temperature, top_p, drafted.draw_uniforms.flatten(), backend)
    return drawn.view(rows, places).long()
