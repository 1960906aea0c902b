"""Which drafted tokens the target keeps, and the token that it adds. Knows nothing of models or sessions.

Terms: a drafted token is *accepted* or rejected; after the first rejection one *recovered* token is drawn
from the residual of the two distributions; after acceptance of all, one *bonus* token from the target's.

`reference` has the rules in torch. In Triton `positions` finds the likeliest tokens and judges greedy rows, `nucleus`
lists the candidates for the threshold of top-p, `verdicts` finds it and tests drafted tokens, `drawing` draws the next
tokens. `race` draws tokens so that target and draft mostly draw the same.
"""

from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.rejection.drawing import draw_own_in_triton, judge_sampled_in_triton
from specahead.kernels.rejection.positions import judge_greedy_in_triton
from specahead.kernels.rejection.race import race
from specahead.kernels.rejection.reference import (
    DraftedRows,
    accept_greedy,
    accept_sampled,
    draw,
    draw_own_in_torch,
    judge_greedy_in_torch,
    judge_sampled_in_torch,
    truncated_probs,
)

__all__ = [
    "DraftedRows",
    "accept_greedy",
    "accept_sampled",
    "draw",
    "draw_own",
    "judge_greedy",
    "judge_sampled",
    "race",
    "truncated_probs",
]


def judge_greedy(
    logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor, backend: Backend = "torch"
) -> tuple[Tensor, Tensor]:
    """Judge by `accept_greedy` with the likeliest tokens; ties go to the lower index.

    logits: [rows, γ + 1, vocab] float32, bfloat16 or float16
    draft_tokens: [rows, γ] int32 or int64, the first `draft_counts[row]` valid; draft_counts: [rows], the same
    Returns accepted [rows] int32 and the next token [rows] int32. Raises NotImplementedError for more drafted tokens
    than Triton takes.
    """
    _check_judged(logits, draft_tokens, draft_counts)
    judge = judge_greedy_in_triton if backend == "triton" else judge_greedy_in_torch
    return judge(logits, draft_tokens, draft_counts)


def judge_sampled(logits: Tensor, drafted: DraftedRows, backend: Backend = "torch") -> tuple[Tensor, Tensor]:
    """Judge by `accept_sampled` against the target's truncated distributions, by `accept_greedy` at temperature 0.

    logits: as for `judge_greedy`
    Returns accepted [rows] int32 and the next token [rows] int32. Raises NotImplementedError for more drafted tokens
    than Triton takes.
    """
    _check_judged(logits, drafted.draft_tokens, drafted.draft_counts)
    assert drafted.support_ids.shape == drafted.support_probs.shape
    assert (
        drafted.accept_uniforms.shape == drafted.draft_tokens.shape and drafted.draw_uniforms.shape == logits.shape[:2]
    )
    assert all(tensor.is_contiguous() for name, tensor in vars(drafted).items() if name != "draft_counts")
    judge = judge_sampled_in_triton if backend == "triton" else judge_sampled_in_torch
    return judge(logits, drafted)


def draw_own(
    logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor, backend: Backend = "torch"
) -> Tensor:
    """Draw a token of each row's truncated distribution by `race`; the likeliest one at temperature 0.

    logits: [rows, vocab] float32, bfloat16 or float16, contiguous. temperature, top_p: [rows] float32
    uniforms: [rows] float64, as for `race.arrivals`. Returns [rows] int32.
    """
    return (draw_own_in_triton if backend == "triton" else draw_own_in_torch)(logits, temperature, top_p, uniforms)


def _check_judged(logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> None:
    rows, gamma = draft_tokens.shape
    assert logits.shape[:2] == (rows, gamma + 1) and draft_counts.shape == (rows,)
    assert logits.is_contiguous() and draft_tokens.is_contiguous()
