"""How far two distributions of the next token lie apart."""

import torch
from torch import Tensor


def divergence(seen: Tensor, true: Tensor) -> Tensor:
    """Compare distributions row by row at temperature 1, before rules and cuts. Launches only.

    seen, true: [rows, vocab] logits of any floating dtype, -inf for tokens that cannot come.
    Returns [rows, 3] float32: the total variation, from 0 to 1; the Kullback-Leibler divergence KL(true || seen) in
    nats; and 1 where the likeliest token is the same, else 0.
    """
    log_true, log_seen = true.float().log_softmax(1), seen.float().log_softmax(1)
    chance = log_true.exp()
    variation = (chance - log_seen.exp()).abs().sum(1) / 2
    ratio = torch.where(chance > 0, log_true - log_seen, 0)
    nats = (chance * ratio).sum(1).clamp(min=0)  # rounding may leave a little less than 0
    same = true.argmax(1) == seen.argmax(1)
    return torch.stack((variation, nats, same.float()), 1)
