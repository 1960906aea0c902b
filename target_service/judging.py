"""Which proposed tokens of which session are kept: rows of logits in, accepted counts and next tokens out."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling import USE_ACCEPT, USE_TARGET, Sampling, truncated_probs, uniforms
from kernels.rejection import accept_greedy, accept_sampled
from wire.messages import Support


@dataclass(frozen=True)
class RoundInput:
    """logits: [len(tokens) + 1, vocab], row i for position base + i. supports: one a token, or none (one-hot)."""

    logits: Tensor
    tokens: list[int]
    supports: list[Support]
    sampling: Sampling
    base: int


def judge_rounds(rounds: list[RoundInput]) -> list[tuple[int, int]]:
    """(accepted, next token) of each round, the greedy and the sampled ones in one kernel call each."""
    outcome: list[tuple[int, int]] = [(0, 0)] * len(rounds)
    greedy = [i for i, item in enumerate(rounds) if item.sampling.greedy]
    sampled = [i for i, item in enumerate(rounds) if not item.sampling.greedy]
    for chosen, judge in ((greedy, _judge_greedy), (sampled, _judge_sampled)):
        if chosen:
            accepted, following = judge([rounds[i] for i in chosen])
            for i, a, token in zip(chosen, accepted.tolist(), following.tolist(), strict=True):
                outcome[i] = a, token
    return outcome


def _drafted(rounds: list[RoundInput], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [rounds, γ] padded with 0, and their counts."""
    gamma = max(len(item.tokens) for item in rounds)
    padded = [item.tokens + [0] * (gamma - len(item.tokens)) for item in rounds]
    counts = torch.tensor([len(item.tokens) for item in rounds], device=device)
    return torch.tensor(padded, dtype=torch.long, device=device).view(len(rounds), gamma), counts


def _judge_greedy(rounds: list[RoundInput]) -> tuple[Tensor, Tensor]:
    device = rounds[0].logits.device
    tokens, counts = _drafted(rounds, device)
    best = torch.cat([item.logits for item in rounds]).argmax(-1)
    target = torch.zeros(len(rounds), tokens.shape[1] + 1, dtype=torch.long, device=device)
    target[_filled(counts + 1, target.shape[1])] = best
    return accept_greedy(tokens, counts, target)


def _judge_sampled(rounds: list[RoundInput]) -> tuple[Tensor, Tensor]:
    device = rounds[0].logits.device
    tokens, counts = _drafted(rounds, device)
    count, gamma = tokens.shape
    vocab = rounds[0].logits.shape[1]
    rows = counts + 1
    temperature = torch.tensor([item.sampling.temperature for item in rounds], device=device)
    top_p = torch.tensor([item.sampling.top_p for item in rounds], device=device)
    logits = torch.cat([item.logits for item in rounds])
    probs = truncated_probs(logits, temperature.repeat_interleave(rows), top_p.repeat_interleave(rows))
    target = torch.zeros(count, gamma + 1, vocab, device=device)
    target[_filled(rows, gamma + 1)] = probs
    draft = torch.zeros(count, gamma, vocab, device=device)
    accept = np.zeros((count, gamma))
    recover = np.zeros((count, gamma + 1))
    for i, item in enumerate(rounds):
        n = len(item.tokens)
        accept[i, :n] = uniforms(item.sampling.seed, item.base, n, USE_ACCEPT)
        recover[i, : n + 1] = uniforms(item.sampling.seed, item.base, n + 1, USE_TARGET)
        if item.supports:
            for j, support in enumerate(item.supports):
                draft[i, j, torch.from_numpy(support.ids).to(device)] = torch.from_numpy(support.probs).to(
                    device
                )
        elif n:
            draft[i, torch.arange(n), tokens[i, :n]] = 1.0
    return accept_sampled(
        tokens,
        counts,
        draft,
        target,
        torch.from_numpy(accept).to(device),
        torch.from_numpy(recover).to(device),
    )


def _filled(counts: Tensor, width: int) -> Tensor:
    """bool [rows, width], the first counts[row] of each row"""
    return torch.arange(width, device=counts.device) < counts[:, None]
