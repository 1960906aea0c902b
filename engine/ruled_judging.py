"""Verdicts of rounds whose logits are changed first, or whose log probabilities are asked for. Runs outside of graphs.

A step's graph judges all of its rows as if they were plain; of those that are not, this puts the right verdict in
place. So sessions without rules pay nothing for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.judging import Drafted, are_finite, cuts_of, judge, lay_out_verdicts, support_of, verdict_layout
from engine.logprobs import TokenLogprobs, token_logprobs
from engine.staging import Staging
from kernels.backends import default_backend

Verdict = tuple[int, int]  # tokens accepted, and the next token


@dataclass(frozen=True)
class RuledVerdict:
    """As of `engine.inputs.SequenceOutput`: tokens accepted and the next token, and what goes with them."""

    verdict: Verdict
    finite: bool
    logprobs: list[TokenLogprobs]


def judge_by_rules(logits: Tensor, rounds: list[Drafted], whatever_is_drafted: bool = False) -> list[RuledVerdict]:
    """Judge rounds by the distributions that their rules leave.

    logits: [rounds, places, vocab] of any floating dtype, row i of a round for position base + i; they stay as they
    are. places: one more than the longest round has tokens, or more. whatever_is_drafted: as for `judge`.
    """
    cuts = cuts_of(rounds)
    staging = Staging(verdict_layout(len(rounds), logits.shape[1] - 1, support_of(rounds), cuts), logits.device)
    lay_out_verdicts(staging.host, rounds)
    staging.send()
    ruled = logits.to(torch.float32, copy=True)
    for of_round, item in zip(ruled, rounds, strict=True):
        for rule in item.rules:
            rule.apply(of_round[: len(item.tokens) + 1], item.committed, item.tokens)
    finite = are_finite(ruled, staging.device["draft_counts"])
    accepted, following = judge(ruled, staging.device, default_backend(logits.device), whatever_is_drafted, cuts)
    found = torch.stack((accepted, following, finite), 1).tolist()  # one wait for the device
    told = _logprobs(logits, rounds, [(a, b) if is_finite else None for a, b, is_finite in found])
    return [RuledVerdict((a, b), bool(is_finite), of) for (a, b, is_finite), of in zip(found, told, strict=True)]


def _logprobs(logits: Tensor, rounds: list[Drafted], verdicts: list[Verdict | None]) -> list[list[TokenLogprobs]]:
    """Return the log probabilities of each verdict's tokens, none of a round that does not ask for them."""
    rows, tokens, owners = list[int](), list[int](), list[int]()
    for i, (item, verdict) in enumerate(zip(rounds, verdicts, strict=True)):
        if item.logprobs is not None and verdict is not None:
            accepted, following = verdict
            rows += [i * logits.shape[1] + place for place in range(accepted + 1)]
            tokens += [*item.tokens[:accepted], following]
            owners += [i] * (accepted + 1)
    told: list[list[TokenLogprobs]] = [[] for _ in rounds]
    if rows:
        most = max(item.logprobs or 0 for item in rounds)
        for owner, found in zip(owners, token_logprobs(logits.flatten(0, 1)[rows], tokens, most), strict=True):
            told[owner].append(found.first(rounds[owner].logprobs or 0))
    return told
