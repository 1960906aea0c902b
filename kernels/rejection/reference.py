"""The rules of acceptance in plain torch: the reference for the Triton kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.rejection.race import race


@dataclass(frozen=True)
class DraftedRows:
    """The rows that `specahead.kernels.rejection.judge_sampled` judges.

    draft_tokens: [rows, γ] int32 or int64, the first `draft_counts[row]` valid; draft_counts: [rows], the same
    support_ids, support_probs: [rows, γ, support] int32 and float32, the distributions that the drafted tokens were
        drawn from: each token at most once; entries of probability 0 are padding; not read in greedy rows
    temperature, top_p: [rows] float32; temperature 0 is greedy
    accept_uniforms, draw_uniforms: [rows, γ] and [rows, γ + 1] float64 or float32 in [0, 1)
    """

    draft_tokens: Tensor
    draft_counts: Tensor
    support_ids: Tensor
    support_probs: Tensor
    temperature: Tensor
    top_p: Tensor
    accept_uniforms: Tensor
    draw_uniforms: Tensor


def accept_greedy(draft_tokens: Tensor, draft_counts: Tensor, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Keep drafted tokens as long as they equal the target's own choice.

    draft_tokens: [rows, γ] int64, the first `draft_counts[row]` valid
    draft_counts: [rows] int64
    target_tokens: [rows, γ + 1] int64, the target's choice at each position
    Returns accepted [rows] int64 and the next token [rows] int64.
    """
    columns = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    match = (draft_tokens == target_tokens[:, :-1]) & (columns < draft_counts[:, None])
    accepted = match.long().cumprod(1).sum(1)
    return accepted, target_tokens.gather(1, accepted[:, None])[:, 0]


def accept_sampled(
    draft_tokens: Tensor,
    draft_counts: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1): the output has the target's distribution.

    draft_tokens: [rows, γ] int64, the first `draft_counts[row]` valid, token i drawn from draft_probs[:, i]
    draft_probs: [rows, γ, vocab] float32
    target_probs: [rows, γ + 1, vocab] float32
    accept_uniforms: [rows, γ] float64 in [0, 1); token i is kept if u < p / q
    draw_uniforms: [rows, γ + 1] float64 in [0, 1); entry i draws the recovered or bonus token at position i
    Returns accepted [rows] int64 and the next token [rows] int64.
    """
    rows, gamma = draft_tokens.shape
    columns = torch.arange(gamma, device=draft_tokens.device)
    drafted = draft_tokens[..., None]
    p = target_probs[:, :-1].gather(2, drafted)[..., 0].double()
    q = draft_probs.gather(2, drafted)[..., 0].double()
    keep = (accept_uniforms * q < p) & (columns < draft_counts[:, None])
    accepted = keep.long().cumprod(1).sum(1)
    row = torch.arange(rows, device=draft_tokens.device)
    p_next = target_probs[row, accepted].double()
    rejected = accepted < draft_counts
    if gamma:
        q_next = draft_probs[row, accepted.clamp(max=gamma - 1)].double()
        residual = (p_next - q_next).clamp(min=0)
        # Rounding can leave an empty residual where p and q are equal; then p itself is the right draw.
        usable = rejected & (residual.sum(1) > 0)
        p_next = residual.where(usable[:, None], p_next)
    return accepted, draw(p_next, draw_uniforms[row, accepted])


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from unnormalised rows by the inverse of their cumulative sums; never an entry of weight 0.

    probs: [rows, n], not negative, each row's sum positive; uniforms: [rows] in [0, 1). Returns [rows] int64.
    """
    cumulative = probs.double().cumsum(1)
    threshold = (uniforms.double() * cumulative[:, -1])[:, None]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # u close to 1 may round up to the total: the last entry of positive weight is meant.
    last = probs.shape[1] - 1 - (probs.flip(1) > 0).long().argmax(1)
    return torch.minimum(token, last)


def truncated_probs(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Return softmax(logits / temperature), cut to the smallest set of mass >= top_p (Holtzman et al. 2020), of sum 1.

    logits [rows, vocab]; temperature (> 0), top_p [rows]. Returns [rows, vocab] float32. Of entries of one
    probability the lower indices are kept.
    """
    probs = (logits.float() / temperature[:, None]).softmax(-1)
    if bool((top_p < 1).any()):
        ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        before = ordered.double().cumsum(-1) - ordered
        kept = ordered.where(before < top_p[:, None], 0.0)
        cut = torch.zeros_like(probs).scatter_(-1, order, kept)
        probs = cut.where(top_p[:, None] < 1, probs)
    return probs / probs.sum(-1, keepdim=True)


def judge_greedy_in_torch(logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> tuple[Tensor, Tensor]:
    accepted, following = accept_greedy(draft_tokens.long(), draft_counts.long(), logits.argmax(-1))
    return accepted.int(), following.int()


def draw_own_in_torch(logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    greedy = temperature == 0
    probs = truncated_probs(logits, temperature.where(~greedy, 1.0), top_p)
    drawn = race(probs, torch.arange(logits.shape[1], device=logits.device)[None], uniforms)
    return logits.argmax(-1).where(greedy, drawn).int()


def judge_sampled_in_torch(logits: Tensor, drafted: DraftedRows) -> tuple[Tensor, Tensor]:
    (rows, gamma), vocab, counts = drafted.draft_tokens.shape, logits.shape[2], drafted.draft_counts
    greedy = drafted.temperature == 0
    probs = truncated_probs(
        logits.flatten(0, 1),
        drafted.temperature.where(~greedy, 1.0).repeat_interleave(gamma + 1),
        drafted.top_p.repeat_interleave(gamma + 1),
    ).view(rows, gamma + 1, vocab)
    draft = torch.zeros(rows, gamma, vocab, device=logits.device)
    # Padding may name any token: it adds 0 to token 0.
    real = drafted.support_probs > 0
    draft.scatter_add_(2, drafted.support_ids.where(real, 0).long(), drafted.support_probs.where(real, 0.0))
    valid = torch.arange(gamma, device=logits.device) < counts[:, None]
    tokens = drafted.draft_tokens.long().where(valid, 0)
    uniforms = drafted.accept_uniforms.double(), drafted.draw_uniforms.double()
    sampled = accept_sampled(tokens, counts.long(), draft, probs, *uniforms)
    likeliest = judge_greedy_in_torch(logits, drafted.draft_tokens, counts)
    accepted, following = (a.where(greedy, b.int()) for a, b in zip(likeliest, sampled, strict=True))
    return accepted, following
