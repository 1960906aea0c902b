"""Draws the next token of drafted rows; launches only."""

from torch import Tensor

from specahead.kernels.backends import default_backend
from specahead.kernels.rejection import race


def draw_tokens(
    logits: Tensor, best: Tensor, temperature: Tensor, top_p: Tensor, least: Tensor, uniforms: Tensor, support: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for each row from its `support` likeliest ones, by a race (kernels.rejection.race).

    A target that draws by the same uniforms mostly draws the same token.
    logits: [rows, vocab].
    best: [rows] int64, the likeliest token, which is taken where the temperature is 0.
    temperature, top_p: [rows] float32; uniforms: [rows] float64.
    least: [rows or 1, n or 1] float32, the share of the likeliest token's probability that each of the n tokens, in
        falling order, must have to be drawn. n is `support`, or the vocabulary if that is smaller.
    Returns tokens [rows] int64, and the distributions: ids int64 and probabilities float32, [rows, n] each.
    """
    greedy = temperature == 0
    heat = temperature.where(~greedy, 1.0)[:, None]
    # A nucleus is a prefix of the sorted distribution, as is what `support` keeps: the shorter of the two is both.
    top, ids = (logits.float() / heat).softmax(-1).topk(min(support, logits.shape[-1]))
    before = top.double().cumsum(-1) - top
    kept = (before < top_p[:, None]) & (top >= least * top[:, :1])
    top = top.where(kept, 0.0)
    top = top / top.sum(-1, keepdim=True)
    drawn = ids.gather(1, race(top, ids, uniforms, default_backend(logits.device))[:, None])[:, 0]
    return best.where(greedy, drawn), ids, top
