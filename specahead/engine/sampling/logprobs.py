"""Log probabilities of tokens, as clients ask for them: by the model's own distribution, before rules change it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its position with theirs, in falling order."""

    logprob: float
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def first(self, count: int) -> "TokenLogprobs":
        """Return the same with at most `count` of the likeliest tokens."""
        return TokenLogprobs(self.logprob, self.top_ids[:count], self.top_logprobs[:count])


def token_logprobs(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Return the log probabilities of tokens, and of the `top` likeliest ones at the position of each.

    logits: [len(tokens), vocab], of any floating dtype; row i is for tokens[i].
    """
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    best, ids = logits.topk(min(top, logits.shape[1]))
    found = zip((own - total)[:, 0].tolist(), ids.tolist(), (best - total).tolist(), strict=True)
    return [TokenLogprobs(*each) for each in found]
