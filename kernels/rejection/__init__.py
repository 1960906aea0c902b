"""Which drafted tokens the target keeps, and the token it adds. Knows nothing of models or sessions.

Terms: a drafted token is *accepted* or rejected; after the first rejection one *recovered* token is drawn
from the residual of the two distributions; after acceptance of all, one *bonus* token from the target's.

`reference` has the rules in torch; `greedy` and `sampled` judge by Triton.
"""

from torch import Tensor

from kernels.backends import check_backend
from kernels.rejection.greedy import judge_greedy_in_triton
from kernels.rejection.reference import (
    accept_greedy,
    accept_sampled,
    draw,
    judge_greedy_in_torch,
    judge_sampled_in_torch,
    truncated_probs,
)
from kernels.rejection.sampled import judge_sampled_in_triton

__all__ = ["accept_greedy", "accept_sampled", "draw", "judge_greedy", "judge_sampled", "truncated_probs"]


def judge_greedy(
    logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Judge by `accept_greedy` of the likeliest tokens, of which ties go to the lower index.

    logits: [rows, γ + 1, vocab] float32, bfloat16 or float16
    draft_tokens: [rows, γ] int32 or int64, the first `draft_counts[row]` valid; draft_counts: [rows], the same
    Returns accepted [rows] int32 and the next token [rows] int32. Raises ValueError for shapes that do not fit,
    NotImplementedError for more drafted tokens than Triton takes.
    """
    check_backend("judge_greedy", backend)
    _check_judged("judge_greedy", logits, draft_tokens, draft_counts)
    judge = judge_greedy_in_triton if backend == "triton" else judge_greedy_in_torch
    return judge(logits, draft_tokens, draft_counts)


def judge_sampled(
    logits: Tensor,
    draft_tokens: Tensor,
    draft_counts: Tensor,
    support_ids: Tensor,
    support_probs: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Judge by `accept_sampled` against the target's truncated distributions, by `accept_greedy` at temperature 0.

    logits, draft_tokens, draft_counts: as for `judge_greedy`
    support_ids, support_probs: [rows, γ, support] int32 and float32, the distributions that the drafted tokens were
        drawn from: each token at most once; entries of probability 0 are padding; not read in greedy rows
    temperature, top_p: [rows] float32; temperature 0 is greedy
    accept_uniforms, draw_uniforms: [rows, γ] and [rows, γ + 1] float64 or float32 in [0, 1)
    Returns accepted [rows] int32 and the next token [rows] int32. Raises ValueError for shapes that do not fit,
    NotImplementedError for more drafted tokens than Triton takes.
    """
    check_backend("judge_sampled", backend)
    _check_judged("judge_sampled", logits, draft_tokens, draft_counts)
    rows, gamma = draft_tokens.shape
    shapes = (
        ("support_ids", support_ids, (rows, gamma, support_ids.shape[-1])),
        ("support_probs", support_probs, (rows, gamma, support_ids.shape[-1])),
        ("temperature", temperature, (rows,)),
        ("top_p", top_p, (rows,)),
        ("accept_uniforms", accept_uniforms, (rows, gamma)),
        ("draw_uniforms", draw_uniforms, (rows, gamma + 1)),
    )
    for name, tensor, shape in shapes:
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"judge_sampled: {name} is {tuple(tensor.shape)}, not a contiguous {shape}")
    judge = judge_sampled_in_triton if backend == "triton" else judge_sampled_in_torch
    return judge(
        logits,
        draft_tokens,
        draft_counts,
        support_ids,
        support_probs,
        temperature,
        top_p,
        accept_uniforms,
        draw_uniforms,
    )


def _check_judged(operation: str, logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> None:
    if logits.dim() != 3 or draft_tokens.dim() != 2 or draft_counts.dim() != 1:
        raise ValueError(f"{operation}: logits are [rows, γ + 1, vocab], tokens [rows, γ], counts [rows]")
    rows, gamma = draft_tokens.shape
    if logits.shape[:2] != (rows, gamma + 1) or len(draft_counts) != rows:
        raise ValueError(
            f"{operation}: logits {tuple(logits.shape)}, {len(draft_counts)} counts, tokens {(rows, gamma)}"
        )
    if not (logits.is_contiguous() and draft_tokens.is_contiguous()):
        raise ValueError(f"{operation}: logits and tokens must be contiguous")
