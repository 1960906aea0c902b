"""Verdicts of rounds whose logits are changed first, or whose log probabilities are asked for. Runs outside of graphs.

A step's graph judges all of its rows as if they were plain; of those that are not, this puts the right verdict in
place. So sessions without rules pay nothing for it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.judging import Drafted, are_finite, judge, lay_out_verdicts, support_of, verdict_layout
from engine.logprobs import TokenLogprobs, token_logprobs
from engine.staging import Staging
from kernels.backends import default_backend


@dataclass(frozen=True)
class RuledVerdict:
    """As of `engine.inputs.SequenceOutput`: tokens accepted and the next token, and what goes with them."""

    verdict: tuple[int, int]
    finite: bool
    logprobs: list[TokenLogprobs]


def judge_by_rules(
    logits: list[Tensor], rounds: list[Drafted], whatever_is_drafted: bool = False
) -> list[RuledVerdict]:
    """Judge rounds by the distributions that their rules, top_k and min_p leave.

    logits: [len(tokens) + 1, vocab] of each round, row i for position base + i; they stay as they are.
    whatever_is_drafted: as for `judge`.
    """
    device, vocab = logits[0].device, logits[0].shape[1]
    gamma = max(len(item.tokens) for item in rounds)
    staging = Staging(verdict_layout(len(rounds), gamma, support_of(rounds)), device)
    lay_out_verdicts(staging.host, rounds)
    staging.send()
    ruled = torch.zeros(len(rounds), gamma + 1, vocab, device=device)
    for of_round, rows, item in zip(ruled, logits, rounds, strict=True):
        changed = of_round[: len(rows)]
        changed.copy_(rows)
        for rule in item.rules:
            rule.apply(changed, item.committed, item.tokens)
    finite = are_finite(ruled, staging.device["draft_counts"]).tolist()
    cut_logits(ruled, rounds)
    accepted, following = judge(ruled, staging.device, default_backend(device), whatever_is_drafted)
    verdicts = list(zip(accepted.tolist(), following.tolist(), strict=True))
    return [
        RuledVerdict(verdict, bool(is_finite), _logprobs(rows, item, verdict) if is_finite else [])
        for verdict, is_finite, rows, item in zip(verdicts, finite, logits, rounds, strict=True)
    ]


def cut_logits(logits: Tensor, rounds: list[Drafted]) -> None:
    """Set to -inf, in place, what top_k and min_p leave out; of tokens as likely as the last one left all are.

    logits: [rounds, places, vocab] float32. Greedy rounds are left as they are.
    """
    for of_round, item in zip(logits, rounds, strict=True):
        sampling = item.sampling
        if not sampling.cuts:
            continue
        least = torch.full_like(of_round[:, :1], -torch.inf)
        if sampling.min_p > 0:  # p >= min_p of the largest p, at this temperature
            least = of_round.amax(-1, keepdim=True) + sampling.temperature * math.log(sampling.min_p)
        if 0 < sampling.top_k < logits.shape[-1]:
            least = torch.maximum(least, of_round.topk(sampling.top_k).values[:, -1:])
        of_round.masked_fill_(of_round < least, -torch.inf)


def _logprobs(logits: Tensor, item: Drafted, verdict: tuple[int, int]) -> list[TokenLogprobs]:
    """Return the log probabilities of a verdict's tokens, if the round asks for them."""
    if item.logprobs is None:
        return []
    accepted, following = verdict
    return token_logprobs(logits[: accepted + 1], [*item.tokens[:accepted], following], item.logprobs)
