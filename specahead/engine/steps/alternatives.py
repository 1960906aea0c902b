"""Alternatives: other tokens that a draft found likely run beside its drafted ones, and save a step where one is right.

A step that rejects a drafted token adds one of its own, which often is the draft's second choice. So the second choice
runs in the same pass, as a leaf of a token tree (SpecInfer, arXiv:2305.09781) beside the chain of drafted tokens, and
the logits after it are there already. Drafted tokens are judged, and the token after them is drawn, as they are without
alternatives. The token after an accepted alternative is drawn as in a step of its own: it only comes sooner.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.model.head import StateTap
from specahead.engine.sampling.judging import judge, verdict_layout
from specahead.engine.steps.shapes import PassShape
from specahead.kernels.backends import default_backend
from specahead.kernels.kv_write import move_kv


@dataclass(frozen=True)
class PassVerdicts:
    """The verdicts of a pass."""

    accepted: Tensor
    """[sequences] int32, how many tokens are accepted."""
    following: Tensor
    """[sequences] int32, the token that follows them."""
    largest: Tensor
    """[sequences, queries], the largest logit at each position: a number, unless the logits are NaN or infinite."""


def drafted_logits(logits: Tensor, shape: PassShape) -> Tensor:
    """Return the logits of the rows that judge drafted tokens, [sequences, queries, vocab]. logits: of all rows."""
    return logits[: shape.sequences * shape.queries].view(shape.sequences, shape.queries, -1)


def accept_alternatives(
    judged: PassVerdicts, given: dict[str, Tensor], shape: PassShape, kv: KVCache, tap: StateTap | None = None
) -> tuple[PassVerdicts, Tensor]:
    """Return the verdicts with alternatives: one that is the token that follows is accepted, and the next one follows.

    Also returns the accepted alternatives, int32 [sequences], -1 where none was. Their KV is moved to where that of the
    rejected tokens lies, and so are their states if there is a `tap`. given: the buffers of the pass, with its logits.
    """
    backend, sequences = default_backend(given["logits"].device), shape.sequences
    assert shape.judge is not None
    at, count = judged.accepted.long(), given["draft_counts"].long()
    leaf = at.clamp(max=shape.alternatives - 1)[:, None]
    is_one = given["alternatives"].gather(1, leaf)[:, 0] == judged.following
    is_one &= at < given["alternative_counts"]
    logits = given["logits"][sequences * shape.queries :].view(sequences, shape.alternatives, -1)
    next_row = logits[torch.arange(sequences, device=at.device), leaf[:, 0]][:, None]
    _, following = judge(next_row, _one_more(given, at), backend, cuts=shape.judge.cuts)
    # Where an alternative is accepted, its logits count as well: 0 times infinity is NaN.
    largest = judged.largest + 0 * next_row.amax(2).where(is_one[:, None], 0)
    row = given["query_starts"][:-1].long() + 1 + at
    most = len(given["slots"]) - 1
    source, target = (given["slots"][each.clamp(max=most)] for each in (row + count, row))
    target = target.where(is_one, -1)
    move_kv(kv.k_pages, kv.v_pages, kv.addresses, source, target, backend)
    if tap is not None:
        tap.move(source, target)
    alternative = judged.following.where(is_one, -1)
    following = following.to(judged.following.dtype).where(is_one, judged.following)
    return PassVerdicts(judged.accepted + is_one, following, largest), alternative


def _one_more(given: dict[str, Tensor], at: Tensor) -> dict[str, Tensor]:
    """Return the inputs (`verdict_layout`) to judge one more token, none drafted, after `at` + 1 tokens [sequences]."""
    more = dict(given)
    for name, (sizes, _) in verdict_layout(0, 0, 1).items():
        if name in given and len(sizes) > 1 and name != "draw_uniforms":
            more[name] = given[name][:, :0].contiguous()
    more["draft_counts"] = torch.zeros_like(given["draft_counts"])
    if "draw_uniforms" in given:
        last = given["draw_uniforms"].shape[1] - 1
        more["draw_uniforms"] = given["draw_uniforms"].gather(1, (at + 1).clamp(max=last)[:, None])
    return more
