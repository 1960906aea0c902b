"""Which drafted tokens the target keeps, and the token it adds. Knows nothing of models or sessions.

Terms: a drafted token is *accepted* or rejected; after the first rejection one *recovered* token is drawn
from the residual of the two distributions; after acceptance of all, one *bonus* token from the target's.
"""

import torch
from torch import Tensor

from kernels.backends import check_backend


def accept_greedy(
    draft_tokens: Tensor, draft_counts: Tensor, target_tokens: Tensor, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Keep drafted tokens as long as they equal the target's own choice.

    draft_tokens: [rows, γ] int64, the first `draft_counts[row]` valid
    draft_counts: [rows] int64
    target_tokens: [rows, γ + 1] int64, the target's choice at each position
    Returns accepted [rows] int64 and the next token [rows] int64.
    """
    check_backend("accept_greedy", backend)
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
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1): the output has the target's distribution.

    draft_tokens: [rows, γ] int64, the first `draft_counts[row]` valid, token i drawn from draft_probs[:, i]
    draft_probs: [rows, γ, vocab] float32
    target_probs: [rows, γ + 1, vocab] float32
    accept_uniforms: [rows, γ] float64 in [0, 1); token i is kept if u < p / q
    draw_uniforms: [rows, γ + 1] float64 in [0, 1); entry i draws the recovered or bonus token at position i
    Returns accepted [rows] int64 and the next token [rows] int64.
    """
    check_backend("accept_sampled", backend)
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
    """Inverse-CDF draws from unnormalised rows; never returns an entry of weight 0.

    probs: [rows, n], not negative, each row's sum positive; uniforms: [rows] in [0, 1). Returns [rows] int64.
    """
    cumulative = probs.double().cumsum(1)
    threshold = (uniforms.double() * cumulative[:, -1])[:, None]
    token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # u close to 1 may round up to the total: the last entry of positive weight is meant.
    last = probs.shape[1] - 1 - (probs.flip(1) > 0).long().argmax(1)
    return torch.minimum(token, last)
