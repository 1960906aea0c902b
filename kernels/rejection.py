"""Which drafted tokens the target keeps, and the token it adds. Knows nothing of models or sessions.

Terms: a drafted token is *accepted* or rejected; after the first rejection one *recovered* token is drawn
from the residual of the two distributions; after acceptance of all, one *bonus* token from the target's.

The Triton kernels go from logits to verdicts without the host and without a row of probabilities in memory; the
vocabulary is split over programs. An entry's *depth* is (largest logit − logit) / temperature · log2 e, its weight
2^−depth. The smallest set of mass top_p is that of all entries up to some depth, and among those of just this depth
of the lower indices. It is found without sorting: two rounds of sums at EDGES depths each leave a bracket of some
thousand entries, whose indices are listed; one program then bisects on the bits of their depths. Every sum has a
fixed order, and what one kernel decides is stored for the next, so that results depend on nothing but the inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.backends import check_backend, follow, jit, overlapping_launch, power_of_two, tl, triton


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


def truncated_probs(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """softmax(logits / temperature) cut to the smallest set of mass >= top_p and renormalised.

    logits [rows, vocab]; temperature (> 0), top_p [rows]. Returns [rows, vocab] float32. Of entries of one
    probability the lower indices are kept.
    """
    probs = (logits.float() / temperature[:, None]).softmax(-1)
    if bool((top_p < 1).any()):
        ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        before = ordered.double().cumsum(-1) - ordered
        kept = ordered.where(before < top_p[:, None], 0.0)
        kept[:, 0] = ordered[:, 0]
        cut = torch.zeros_like(probs).scatter_(-1, order, kept)
        probs = cut.where(top_p[:, None] < 1, probs)
    return probs / probs.sum(-1, keepdim=True)


def judge_greedy(
    logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """`accept_greedy` of the likeliest tokens, ties to the lower index.

    logits: [rows, γ + 1, vocab] float32, bfloat16 or float16
    draft_tokens: [rows, γ] int32 or int64, the first `draft_counts[row]` valid; draft_counts: [rows], the same
    Returns accepted [rows] int32 and the next token [rows] int32.
    """
    check_backend("judge_greedy", backend, ("torch", "triton"))
    _check_judged("judge_greedy", logits, draft_tokens, draft_counts)
    if backend == "triton":
        return _triton_judge_greedy(logits, draft_tokens, draft_counts)
    accepted, following = accept_greedy(draft_tokens.long(), draft_counts.long(), logits.argmax(-1))
    return accepted.int(), following.int()


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
    """`accept_sampled` against the target's truncated distributions, and `accept_greedy` where temperature is 0.

    logits, draft_tokens, draft_counts: as for `judge_greedy`
    support_ids, support_probs: [rows, γ, support] int32 and float32, the distributions that the drafted tokens were
        drawn from: each token at most once; entries of probability 0 are padding; not read in greedy rows
    temperature, top_p: [rows] float32; temperature 0 is greedy
    accept_uniforms, draw_uniforms: [rows, γ] and [rows, γ + 1] float64 or float32 in [0, 1)
    Returns accepted [rows] int32 and the next token [rows] int32.
    """
    check_backend("judge_sampled", backend, ("torch", "triton"))
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
    judge = _triton_judge_sampled if backend == "triton" else _torch_judge_sampled
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


def _torch_judge_sampled(
    logits: Tensor,
    draft_tokens: Tensor,
    draft_counts: Tensor,
    support_ids: Tensor,
    support_probs: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    (rows, gamma), vocab = draft_tokens.shape, logits.shape[2]
    greedy = temperature == 0
    positions = gamma + 1
    probs = truncated_probs(
        logits.flatten(0, 1),
        temperature.where(~greedy, 1.0).repeat_interleave(positions),
        top_p.repeat_interleave(positions),
    )
    draft = torch.zeros(rows, gamma, vocab, device=logits.device)
    # Padding may name any token: it adds 0 to token 0.
    real = support_probs > 0
    draft.scatter_add_(2, support_ids.where(real, 0).long(), support_probs.where(real, 0.0))
    sampled = accept_sampled(
        draft_tokens.long().where(torch.arange(gamma, device=logits.device) < draft_counts[:, None], 0),
        draft_counts.long(),
        draft,
        probs.view(rows, positions, vocab),
        accept_uniforms.double(),
        draw_uniforms.double(),
    )
    likeliest = judge_greedy(logits, draft_tokens, draft_counts)
    accepted, following = (a.where(greedy, b.int()) for a, b in zip(likeliest, sampled, strict=True))
    return accepted, following


# Triton

CHUNK = 4096  # entries of the vocabulary that a program takes; at most 32768: lists hold int16
EDGES = 8  # depths at which a round of narrowing sums; _sums_of_eight is written for them
CANDIDATES = 64  # of each chunk, that the bisecting program holds in registers; more are read again each time
SUPPORT = 128  # support entries taken at once
MAX_GAMMA = 31

# A number that kernels may refer to; they are defined without Triton too.
_constant: Callable[[int], Any] = int if triton is None else tl.constexpr

# Floats of a position that kernels hand on, each [rows * (γ + 1)].
PEAK = _constant(0)  # the largest logit
MASS = _constant(1)  # all weights' sum
WANTED = _constant(2)  # the share of it to be kept
LOWER = _constant(3)  # the threshold's bracket after the first round: a depth, and the mass above it
BELOW_LOWER = _constant(4)
FROM = _constant(5)  # and after the second: candidates have depths in [from, upto)
UPTO = _constant(6)
BELOW_FROM = _constant(7)
KEPT = _constant(8)  # the sum of the weights that are kept
FLOATS = 9
# And integers.
CUT = _constant(0)  # bits of the largest depth that is kept
LAST = _constant(1)  # the last index that is kept at just this depth
PASSED = _constant(2)  # whether the drafted token passes its test
LIKELIEST = _constant(3)  # of greedy rows
INTS = 4


def _cut(logits: Tensor, gamma: int) -> dict[str, int]:
    """How rows of logits are split; a variant is compiled for each vocabulary and each power of two of γ + 1."""
    if gamma > MAX_GAMMA:
        raise NotImplementedError(f"judging {gamma} drafted tokens; Triton takes up to {MAX_GAMMA}")
    vocab = logits.shape[2]
    splits = -(-vocab // CHUNK)
    return {"VOCAB": vocab, "CHUNK": CHUNK, "SPLITS": splits, "SPLITS_2": power_of_two(splits)}


def _triton_judge_greedy(logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> tuple[Tensor, Tensor]:
    (rows, gamma), device = draft_tokens.shape, logits.device
    cut = _cut(logits, gamma)
    every, overlap = rows * (gamma + 1), overlapping_launch(device)
    accepted, following = torch.empty(2, rows, dtype=torch.int32, device=device)
    if not rows:
        return accepted, following
    best = torch.empty(every, cut["SPLITS"], dtype=torch.float32, device=device)
    tokens = torch.empty(every, cut["SPLITS"], dtype=torch.int32, device=device)
    _best_kernel[(cut["SPLITS"], every)](
        logits, draft_counts, best, best, tokens, best, gamma, **cut, SAMPLED=False, **overlap
    )
    _greedy_verdict_kernel[(rows,)](
        best,
        tokens,
        draft_tokens,
        draft_counts,
        accepted,
        following,
        gamma,
        SPLITS=cut["SPLITS"],
        SPLITS_2=cut["SPLITS_2"],
        PLACES=power_of_two(gamma + 1),
        **overlap,
    )
    return accepted, following


def _triton_judge_sampled(
    logits: Tensor,
    draft_tokens: Tensor,
    draft_counts: Tensor,
    support_ids: Tensor,
    support_probs: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    (rows, gamma), device = draft_tokens.shape, logits.device
    cut = _cut(logits, gamma)
    splits, every, overlap = cut["SPLITS"], rows * (gamma + 1), overlapping_launch(device)
    accepted, following = torch.empty(2, rows, dtype=torch.int32, device=device)
    if not rows:
        return accepted, following

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    best, tokens, sums = (
        scratch(every, splits),
        scratch(every, splits, dtype=torch.int32),
        scratch(every, splits),
    )
    floats, ints = scratch(FLOATS, every), scratch(INTS, every, dtype=torch.int32)
    coarse, coarse_sums = scratch(every, EDGES), scratch(every, splits, EDGES)
    fine, fine_sums = scratch(every, EDGES), scratch(every, splits, EDGES)
    listed, listed_counts = (
        scratch(every, splits, CHUNK, dtype=torch.int16),
        scratch(every, splits, dtype=torch.int32),
    )
    weights, chunk_sums = scratch(rows, splits, CHUNK), scratch(2, rows, splits)
    of_positions, of_rows = (splits, every), (splits, rows)
    common = (logits, draft_counts, temperature)
    _best_kernel[of_positions](*common, best, tokens, sums, gamma, **cut, SAMPLED=True, **overlap)
    _coarse_kernel[of_positions](
        *common, top_p, best, sums, floats, coarse, coarse_sums, gamma, every, **cut, EDGES=EDGES, **overlap
    )
    _fine_kernel[of_positions](
        *common,
        top_p,
        floats,
        coarse,
        coarse_sums,
        fine,
        fine_sums,
        gamma,
        every,
        **cut,
        EDGES=EDGES,
        **overlap,
    )
    _list_kernel[of_positions](
        *common,
        top_p,
        floats,
        fine,
        fine_sums,
        listed,
        listed_counts,
        gamma,
        every,
        **cut,
        EDGES=EDGES,
        **overlap,
    )
    _verdict_kernel[(every,)](
        *common,
        top_p,
        best,
        tokens,
        floats,
        ints,
        listed,
        listed_counts,
        draft_tokens,
        support_ids,
        support_probs,
        accept_uniforms,
        gamma,
        every,
        support_ids.shape[2],
        **cut,
        CANDIDATES=min(CANDIDATES, CHUNK),
        SUPPORT=SUPPORT,
        num_warps=8,
        **overlap,
    )
    _weights_kernel[of_rows](
        *common,
        floats,
        ints,
        support_ids,
        support_probs,
        weights,
        chunk_sums,
        accepted,
        following,
        gamma,
        every,
        rows,
        support_ids.shape[2],
        **cut,
        PLACES=power_of_two(gamma + 1),
        SUPPORT=SUPPORT,
        **overlap,
    )
    _draw_kernel[(rows,)](
        *common,
        floats,
        ints,
        weights,
        chunk_sums,
        draw_uniforms,
        accepted,
        following,
        gamma,
        every,
        rows,
        **cut,
        num_warps=8,
        **overlap,
    )
    return accepted, following


@jit
def _logits_at(logits_ptr, at, index, VOCAB: tl.constexpr):
    """float32 logits of position `at`; -inf beyond the vocabulary."""
    row_ptr = logits_ptr + at.to(tl.int64) * VOCAB
    return tl.load(row_ptr + index, mask=index < VOCAB, other=-float("inf")).to(tl.float32)


@jit
def _scale(temperature_ptr, row):
    """From logits to depths; 0 in a greedy row."""
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    return tl.where(temperature == 0, 0.0, 1.4426950408889634 / tl.maximum(temperature, 1e-30))


@jit
def _depth(logits, peak, scale):
    """Never negative, so that its bits are ordered as it is. The same in all kernels: nothing in it can be fused."""
    return (peak - logits) * scale


@jit
def _bits(depth):
    return depth.to(tl.int32, bitcast=True)


@jit
def _is_kept(bits, index, cut, last):
    return (bits < cut) | ((bits == cut) & (index <= last))


@jit
def _best_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    best_ptr,
    tokens_ptr,
    sums_ptr,
    gamma,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each chunk of each position: the largest logit, its lowest index, the sum of weights relative to it."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    if at % (gamma + 1) > tl.load(counts_ptr + row):
        return
    index = split * CHUNK + tl.arange(0, CHUNK)
    logits = _logits_at(logits_ptr, at, index, VOCAB)
    best = tl.max(logits, 0)
    tl.store(best_ptr + at * SPLITS + split, best)
    tl.store(tokens_ptr + at * SPLITS + split, tl.min(tl.where(logits == best, index, VOCAB), 0))
    if SAMPLED:
        scale = _scale(temperature_ptr, row)
        if scale > 0:
            base = tl.where(best == -float("inf"), 0.0, best)
            weights = tl.exp2(-_depth(logits, base, scale))
            tl.store(sums_ptr + at * SPLITS + split, tl.sum(weights, 0))


@jit
def _likeliest(best_ptr, tokens_ptr, at, there, SPLITS: tl.constexpr, SPLITS_2: tl.constexpr):
    """The likeliest token of positions `at` [n], the lowest of several; 0 where not `there`."""
    split = tl.arange(0, SPLITS_2)[None, :]
    inside = there[:, None] & (split < SPLITS)
    best = tl.load(best_ptr + at[:, None] * SPLITS + split, mask=inside, other=-float("inf"))
    tokens = tl.load(tokens_ptr + at[:, None] * SPLITS + split, mask=inside, other=0)
    return tl.min(tl.where(inside & (best == tl.max(best, 1)[:, None]), tokens, 2**31 - 1), 1)


@jit
def _greedy_verdict_kernel(
    best_ptr,
    tokens_ptr,
    draft_tokens_ptr,
    counts_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0)
    place = tl.arange(0, PLACES)
    count = tl.load(counts_ptr + row).to(tl.int32)
    likeliest = _likeliest(best_ptr, tokens_ptr, row * (gamma + 1) + place, place <= count, SPLITS, SPLITS_2)
    drafted = tl.load(draft_tokens_ptr + row * gamma + place, mask=place < count, other=-1).to(tl.int32)
    accepted = tl.min(tl.where((place < count) & (drafted == likeliest), PLACES, place), 0)
    tl.store(accepted_ptr + row, accepted)
    tl.store(following_ptr + row, tl.sum(tl.where(place == accepted, likeliest, 0), 0))


@jit
def _by_eights(taken, weights, CHUNK: tl.constexpr):
    """The sums of what is taken over eight neighbours, which one thread holds: [CHUNK / 8]"""
    return tl.sum(tl.reshape(tl.where(taken, weights, 0.0), [CHUNK // 8, 8]), 1)


@jit
def _sums_of_eight(parts):
    """The sums of eight vectors, [8], by one reduction across threads."""
    evens = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
    odds = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
    return tl.reshape(tl.sum(tl.join(evens, odds), 0), [8])


@jit
def _coarse_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    best_ptr,
    chunk_sums_ptr,
    floats_ptr,
    edges_ptr,
    sums_ptr,
    gamma,
    every,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    EDGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A position's peak and mass; a chunk's mass above each of EDGES depths that share out the possible ones."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = _scale(temperature_ptr, row)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0):
        return
    splits = tl.arange(0, SPLITS_2)
    best = tl.load(best_ptr + at * SPLITS + splits, mask=splits < SPLITS, other=-float("inf"))
    sums = tl.load(chunk_sums_ptr + at * SPLITS + splits, mask=splits < SPLITS, other=0.0)
    peak = tl.max(best, 0)
    mass = tl.sum(sums * tl.exp2(-_depth(best, peak, scale)), 0)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if split == 0:
        tl.store(floats_ptr + PEAK * every + at, peak)
        tl.store(floats_ptr + MASS * every + at, mass)
        tl.store(floats_ptr + WANTED * every + at, top_p * mass)
    if top_p < 1:
        # The entries at and behind the threshold weigh at least (1 - top_p) of all, and are at most VOCAB: so much
        # over VOCAB is the least that the threshold's own can weigh. The margin is for rounding.
        reach = tl.log2(VOCAB / (mass * (1.0 - top_p))) + 0.01
        index = split * CHUNK + tl.arange(0, CHUNK)
        depth = _depth(_logits_at(logits_ptr, at, index, VOCAB), peak, scale)
        weights = tl.exp2(-depth)
        parts = ()
        for k in tl.static_range(EDGES):
            edge = reach * ((k + 1) / EDGES)
            if split == 0:
                tl.store(edges_ptr + at * EDGES + k, edge)
            parts = parts + (_by_eights(depth < edge, weights, CHUNK),)  # type: ignore[assignment]
        tl.store(sums_ptr + (at * SPLITS + split) * EDGES + tl.arange(0, EDGES), _sums_of_eight(parts))


@jit
def _crossing(
    edges_ptr,
    sums_ptr,
    at,
    wanted,
    lower,
    below,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Between which of the ascending edges the mass reaches `wanted`: `lower` and the mass `below` it come first.

    Returns the bracket [lower, upper), the mass below it, its share of mass that is wanted still, and the mass in the
    bracket and in its two neighbours.
    """
    k = tl.arange(0, EDGES)
    splits = tl.arange(0, SPLITS_2)
    sums = tl.load(
        sums_ptr + (at * SPLITS + splits[:, None]) * EDGES + k[None, :],
        mask=splits[:, None] < SPLITS,
        other=0.0,
    )
    mass = tl.sum(sums, 0)
    edges = tl.load(edges_ptr + at * EDGES + k)
    # Rounding can leave all short of it; then the last bracket's entries are all wanted.
    j = tl.minimum(tl.sum((mass < wanted).to(tl.int32), 0), EDGES - 1)
    first = below
    below = tl.max(tl.where(k < j, mass, first), 0)
    upto = tl.sum(tl.where(k == j, mass, 0.0), 0)
    inside = upto - below
    before = below - tl.max(tl.where(k < j - 1, mass, first), 0)
    after = tl.where(j < EDGES - 1, tl.sum(tl.where(k == j + 1, mass, 0.0), 0) - upto, inside)
    upper = tl.sum(tl.where(k == j, edges, 0.0), 0)
    lower = tl.max(tl.where(k < j, edges, lower), 0)
    return lower, upper, below, inside, before, after


@jit
def _fine_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    floats_ptr,
    coarse_ptr,
    coarse_sums_ptr,
    edges_ptr,
    sums_ptr,
    gamma,
    every,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    EDGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk's mass above each of EDGES depths in the bracket, ever closer to where the threshold should be."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = _scale(temperature_ptr, row)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0) | (top_p >= 1):
        return
    logits = _logits_at(logits_ptr, at, split * CHUNK + tl.arange(0, CHUNK), VOCAB)  # while other loads wait
    peak = tl.load(floats_ptr + PEAK * every + at)
    wanted = tl.load(floats_ptr + WANTED * every + at)
    lower, upper, below, inside, before, after = _crossing(
        coarse_ptr, coarse_sums_ptr, at, wanted, 0.0, 0.0, SPLITS, SPLITS_2, EDGES
    )
    if split == 0:
        tl.store(floats_ptr + LOWER * every + at, lower)
        tl.store(floats_ptr + BELOW_LOWER * every + at, below)
    # Mass per depth taken as a line between the means with the neighbours: where it has reached what is wanted.
    share = tl.minimum(tl.maximum((wanted - below) / tl.maximum(inside, 1e-30), 0.0), 1.0)
    here, there = before + inside, inside + after
    both = share * (here + there)
    guess = both / tl.maximum(here + tl.sqrt(tl.maximum(here * here + (there - here) * both, 0.0)), 1e-30)
    depth = _depth(logits, peak, scale)
    weights = tl.exp2(-depth)
    parts = ()
    for k in tl.static_range(EDGES):
        # -1/2, -1/8, … and …, 1/16, 1/4; the last edge is the bracket's own.
        part = guess - 2.0 * 0.25 ** (k + 1) if k < EDGES // 2 else guess + 0.25 ** (EDGES - 1 - k)
        edge = lower + (upper - lower) * tl.minimum(tl.maximum(part, 0.0), 1.0)
        if k == EDGES - 1:
            edge = upper
        if split == 0:
            tl.store(edges_ptr + at * EDGES + k, edge)
        parts = parts + (_by_eights(depth < edge, weights, CHUNK),)  # type: ignore[assignment]
    tl.store(sums_ptr + (at * SPLITS + split) * EDGES + tl.arange(0, EDGES), _sums_of_eight(parts))


@jit
def _list_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    floats_ptr,
    edges_ptr,
    sums_ptr,
    listed_ptr,
    listed_counts_ptr,
    gamma,
    every,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    EDGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Which entries of a chunk lie in the second round's bracket, ascending."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = _scale(temperature_ptr, row)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0) | (top_p >= 1):
        return
    logits = _logits_at(logits_ptr, at, split * CHUNK + tl.arange(0, CHUNK), VOCAB)  # while other loads wait
    peak = tl.load(floats_ptr + PEAK * every + at)
    wanted = tl.load(floats_ptr + WANTED * every + at)
    lower = tl.load(floats_ptr + LOWER * every + at)
    below = tl.load(floats_ptr + BELOW_LOWER * every + at)
    lower, upper, below, _, _, _ = _crossing(
        edges_ptr, sums_ptr, at, wanted, lower, below, SPLITS, SPLITS_2, EDGES
    )
    if split == 0:
        tl.store(floats_ptr + FROM * every + at, lower)
        tl.store(floats_ptr + UPTO * every + at, upper)
        tl.store(floats_ptr + BELOW_FROM * every + at, below)
    inner = tl.arange(0, CHUNK)
    depth = _depth(logits, peak, scale)
    inside = (depth >= lower) & (depth < upper)
    order = tl.cumsum(inside.to(tl.int32), 0)
    place = (at.to(tl.int64) * SPLITS + split) * CHUNK + order - 1
    tl.store(listed_ptr + place, inner.to(tl.int16), mask=inside)
    tl.store(listed_counts_ptr + at * SPLITS + split, tl.sum(inside.to(tl.int32), 0))


@jit
def _weight_of(bits):
    return tl.exp2(-bits.to(tl.float32, bitcast=True))


@jit
def _sum(values):
    return tl.sum(tl.sum(values, 1), 0)


@jit
def _candidates(
    row_ptr,
    lists_ptr,
    column,
    held,
    peak,
    scale,
    CHUNK: tl.constexpr,
    SPLITS_2: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Of each chunk of a position its listed entries from `column` on: indices and depth bits [SPLITS_2, CANDIDATES].

    row_ptr, lists_ptr: the position's logits and lists. held: [SPLITS_2], entries of each list. Bits are -1 past them.
    """
    splits = tl.arange(0, SPLITS_2)[:, None]
    columns = column + tl.arange(0, CANDIDATES)[None, :]
    there = columns < held[:, None]
    index = splits * CHUNK + tl.load(lists_ptr + splits * CHUNK + columns, mask=there, other=0).to(tl.int32)
    logits = tl.load(row_ptr + index, mask=there, other=0.0).to(tl.float32)
    return index, tl.where(there, _bits(_depth(logits, peak, scale)), -1)


@jit
def _masses_to(
    bits,
    weights,
    p0,
    p1,
    p2,
    row_ptr,
    lists_ptr,
    held,
    most,
    peak,
    scale,
    CHUNK: tl.constexpr,
    SPLITS_2: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The weights' sums of candidates up to three depths: of a first tile, given, and of others, read every time."""
    m0 = _sum(tl.where(bits <= p0, weights, 0.0))
    m1 = _sum(tl.where(bits <= p1, weights, 0.0))
    m2 = _sum(tl.where(bits <= p2, weights, 0.0))
    for column in tl.range(CANDIDATES, most, CANDIDATES):
        _, more = _candidates(row_ptr, lists_ptr, column, held, peak, scale, CHUNK, SPLITS_2, CANDIDATES)
        others = tl.where(more >= 0, _weight_of(more), 0.0)
        m0 += _sum(tl.where(more <= p0, others, 0.0))
        m1 += _sum(tl.where(more <= p1, others, 0.0))
        m2 += _sum(tl.where(more <= p2, others, 0.0))
    return m0, m1, m2


@jit
def _ties_to(
    index,
    bits,
    cut,
    last,
    row_ptr,
    lists_ptr,
    held,
    most,
    peak,
    scale,
    CHUNK: tl.constexpr,
    SPLITS_2: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """How many candidates at just this depth have an index up to `last`."""
    ties = _sum(((bits == cut) & (index <= last)).to(tl.int32))
    for column in tl.range(CANDIDATES, most, CANDIDATES):
        where, more = _candidates(row_ptr, lists_ptr, column, held, peak, scale, CHUNK, SPLITS_2, CANDIDATES)
        ties += _sum(((more == cut) & (where <= last)).to(tl.int32))
    return ties


@jit
def _threshold(
    row_ptr,
    lists_ptr,
    held,
    wanted,
    start,
    before,
    peak,
    scale,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS_2: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """CUT, LAST and KEPT of a position from its candidates, which begin at depth `start` with a mass `before` them."""
    most = tl.max(held, 0)
    index, bits = _candidates(row_ptr, lists_ptr, 0, held, peak, scale, CHUNK, SPLITS_2, CANDIDATES)
    weights = tl.where(bits >= 0, _weight_of(bits), 0.0)
    low = tl.min(tl.min(tl.where(bits >= 0, bits, 2**31 - 1), 1), 0)
    high = tl.max(tl.max(bits, 1), 0)
    for column in tl.range(CANDIDATES, most, CANDIDATES):
        _, more = _candidates(row_ptr, lists_ptr, column, held, peak, scale, CHUNK, SPLITS_2, CANDIDATES)
        low = tl.minimum(low, tl.min(tl.min(tl.where(more >= 0, more, 2**31 - 1), 1), 0))
        high = tl.maximum(high, tl.max(tl.max(more, 1), 0))
    # The least depth up to which the mass is enough; the largest candidate's if rounding leaves all short of it.
    # Three probes a step, which do not wait for each other. A last step takes the mass above that depth.
    above = before
    searching = most > 0
    while searching:
        searching = low < high
        quarter = (high - low) // 4
        p0 = tl.where(searching, low + quarter, low - 1)
        p1 = tl.where(searching, low + (high - low) // 2, low - 1)
        p2 = tl.where(searching, high - 1 - quarter, low - 1)
        m0, m1, m2 = _masses_to(
            bits,
            weights,
            p0,
            p1,
            p2,
            row_ptr,
            lists_ptr,
            held,
            most,
            peak,
            scale,
            CHUNK,
            SPLITS_2,
            CANDIDATES,
        )
        above = before + m0
        enough0, enough1, enough2 = above >= wanted, before + m1 >= wanted, before + m2 >= wanted
        floor = tl.where(enough0, low, tl.where(enough1, p0 + 1, tl.where(enough2, p1 + 1, p2 + 1)))
        roof = tl.where(enough0, p0, tl.where(enough1, p1, tl.where(enough2, p2, high)))
        low = tl.where(searching, floor, low)
        high = tl.where(searching, roof, high)
    # Of the entries at this depth the first ones: as many as it takes, and one at least.
    ties = _ties_to(
        index,
        bits,
        low,
        VOCAB,
        row_ptr,
        lists_ptr,
        held,
        most,
        peak,
        scale,
        CHUNK,
        SPLITS_2,
        CANDIDATES,
    )
    weight = _weight_of(low)
    lacking = tl.ceil((wanted - above) / tl.maximum(weight, 1e-37))
    needed = tl.minimum(tl.minimum(tl.maximum(lacking, 1.0), 2.0**30).to(tl.int32), ties)
    first, last = 0, tl.where(needed < ties, VOCAB - 1, 0)
    while first < last:
        middle = (first + last) // 2
        count = _ties_to(
            index,
            bits,
            low,
            middle,
            row_ptr,
            lists_ptr,
            held,
            most,
            peak,
            scale,
            CHUNK,
            SPLITS_2,
            CANDIDATES,
        )
        last = tl.where(count >= needed, middle, last)
        first = tl.where(count >= needed, first, middle + 1)
    # Rounding can leave no candidates at all: then what lies above the bracket is kept.
    cut = tl.where(most > 0, low, _bits(start))
    last = tl.where(most > 0, tl.where(needed < ties, last, VOCAB), -1)
    return cut, last, tl.where(most > 0, above + needed * weight, before)


@jit
def _verdict_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    best_ptr,
    tokens_ptr,
    floats_ptr,
    ints_ptr,
    listed_ptr,
    listed_counts_ptr,
    draft_tokens_ptr,
    support_ids_ptr,
    support_probs_ptr,
    uniforms_ptr,
    gamma,
    every,
    support,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SUPPORT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A position's threshold, and whether its drafted token passes."""
    follow(PDL)
    at = tl.program_id(0)
    row = at // (gamma + 1)
    place = at % (gamma + 1)
    count = tl.load(counts_ptr + row).to(tl.int32)
    if place > count:
        return
    drafted = tl.load(draft_tokens_ptr + row * gamma + place, mask=place < count, other=-1).to(tl.int32)
    scale = _scale(temperature_ptr, row)
    if scale == 0:
        only = at + tl.arange(0, 1)
        likeliest = tl.sum(_likeliest(best_ptr, tokens_ptr, only, only >= 0, SPLITS, SPLITS_2), 0)
        tl.store(ints_ptr + LIKELIEST * every + at, likeliest)
        tl.store(ints_ptr + PASSED * every + at, (likeliest == drafted).to(tl.int32))
    else:
        peak = tl.load(floats_ptr + PEAK * every + at)
        if tl.load(top_p_ptr + row).to(tl.float32) < 1:
            splits = tl.arange(0, SPLITS_2)
            cut, last, kept = _threshold(
                logits_ptr + at.to(tl.int64) * VOCAB,
                listed_ptr + at.to(tl.int64) * SPLITS * CHUNK,
                tl.load(listed_counts_ptr + at * SPLITS + splits, mask=splits < SPLITS, other=0),
                tl.load(floats_ptr + WANTED * every + at),
                tl.load(floats_ptr + FROM * every + at),
                tl.load(floats_ptr + BELOW_FROM * every + at),
                peak,
                scale,
                VOCAB,
                CHUNK,
                SPLITS_2,
                CANDIDATES,
            )
        else:
            cut, last = 0x7F800000, -1  # all of finite depth
            kept = tl.load(floats_ptr + MASS * every + at)
        tl.store(ints_ptr + CUT * every + at, cut)
        tl.store(ints_ptr + LAST * every + at, last)
        tl.store(floats_ptr + KEPT * every + at, kept)
        if place < count:
            draft = row * gamma + place
            q = tl.zeros([SUPPORT], tl.float32)
            for s in tl.range(0, support, SUPPORT):
                entry = s + tl.arange(0, SUPPORT)
                ids = tl.load(support_ids_ptr + draft * support + entry, mask=entry < support, other=-1)
                probs = tl.load(support_probs_ptr + draft * support + entry, mask=entry < support, other=0.0)
                q += tl.where(ids == drafted, probs, 0.0)
            logit = tl.load(logits_ptr + at.to(tl.int64) * VOCAB + drafted).to(tl.float32)
            bits = _bits(_depth(logit, peak, scale))
            p = tl.where(_is_kept(bits, drafted, cut, last), _weight_of(bits) / kept, 0.0)
            u = tl.load(uniforms_ptr + draft).to(tl.float64)
            passed = u * tl.sum(q, 0).to(tl.float64) < p.to(tl.float64)
            tl.store(ints_ptr + PASSED * every + at, passed.to(tl.int32))


@jit
def _target_probs(logits_ptr, floats_ptr, ints_ptr, at, every, scale, index, VOCAB: tl.constexpr):
    """The target's truncated distribution at a position, of these entries of the vocabulary."""
    peak = tl.load(floats_ptr + PEAK * every + at)
    kept = tl.load(floats_ptr + KEPT * every + at)
    cut = tl.load(ints_ptr + CUT * every + at)
    last = tl.load(ints_ptr + LAST * every + at)
    bits = _bits(_depth(_logits_at(logits_ptr, at, index, VOCAB), peak, scale))
    inside = _is_kept(bits, index, cut, last) & (index < VOCAB)
    return tl.where(inside, _weight_of(bits) / kept, 0.0)


@jit
def _weights_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    floats_ptr,
    ints_ptr,
    support_ids_ptr,
    support_probs_ptr,
    weights_ptr,
    chunk_sums_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    every,
    rows,
    support,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PLACES: tl.constexpr,
    SUPPORT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's verdict, and of one chunk the weights that its next token is drawn with; their sum, and that of p."""
    follow(PDL)
    split, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts_ptr + row).to(tl.int32)
    places = tl.arange(0, PLACES)
    proposed = places < count
    passed = tl.load(ints_ptr + PASSED * every + row * (gamma + 1) + places, mask=proposed, other=0)
    accepted = tl.min(tl.where(proposed & (passed != 0), PLACES, places), 0)
    at = row * (gamma + 1) + accepted
    scale = _scale(temperature_ptr, row)
    if split == 0:
        tl.store(accepted_ptr + row, accepted)
        if scale == 0:
            tl.store(following_ptr + row, tl.load(ints_ptr + LIKELIEST * every + at))
    if scale == 0:
        return
    inner = tl.arange(0, CHUNK)
    probs = _target_probs(logits_ptr, floats_ptr, ints_ptr, at, every, scale, split * CHUNK + inner, VOCAB)
    chunk_ptr = weights_ptr + (row.to(tl.int64) * SPLITS + split) * CHUNK
    tl.store(chunk_ptr + inner, probs)
    total = tl.sum(probs, 0)
    tl.store(chunk_sums_ptr + (rows + row) * SPLITS + split, total)
    if accepted < count:
        # The draft's few entries are taken off in memory, by other threads than wrote them.
        tl.debug_barrier()
        draft = (row * gamma + accepted) * support
        for s in tl.range(0, support, SUPPORT):
            entry = s + tl.arange(0, SUPPORT)
            q = tl.load(support_probs_ptr + draft + entry, mask=entry < support, other=0.0)
            near = tl.load(support_ids_ptr + draft + entry, mask=entry < support, other=-1) - split * CHUNK
            ours = (q > 0) & (near >= 0) & (near < CHUNK)
            p = tl.load(chunk_ptr + near, mask=ours, other=0.0)
            tl.store(chunk_ptr + near, tl.maximum(p - q, 0.0), mask=ours)
        tl.debug_barrier()
        total = tl.sum(tl.load(chunk_ptr + inner), 0)
    tl.store(chunk_sums_ptr + row * SPLITS + split, total)


@jit
def _draw_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    floats_ptr,
    ints_ptr,
    weights_ptr,
    chunk_sums_ptr,
    uniforms_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    every,
    rows,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PDL: tl.constexpr,
):
    """The inverse of the cumulative distribution: first over chunks, then inside one."""
    follow(PDL)
    row = tl.program_id(0)
    scale = _scale(temperature_ptr, row)
    if scale == 0:
        return
    at = row * (gamma + 1) + tl.load(accepted_ptr + row)
    splits = tl.arange(0, SPLITS_2)
    there = splits < SPLITS
    sums = tl.load(chunk_sums_ptr + row * SPLITS + splits, mask=there, other=0.0)
    # Rounding can leave an empty residual where p and q are equal; then p itself is the right draw.
    empty = tl.sum(sums, 0) == 0
    if empty:
        sums = tl.load(chunk_sums_ptr + (rows + row) * SPLITS + splits, mask=there, other=0.0)
    wide = sums.to(tl.float64)
    ends = tl.cumsum(wide, 0)
    threshold = tl.load(uniforms_ptr + at).to(tl.float64) * tl.sum(wide, 0)
    # u close to 1 may round up to the total: then the last of positive weight is meant, here and below.
    chunk = tl.minimum(
        tl.min(tl.where((ends > threshold) & (sums > 0), splits, SPLITS_2), 0),
        tl.max(tl.where(sums > 0, splits, 0), 0),
    )
    rest = (threshold - tl.sum(tl.where(splits < chunk, wide, 0.0), 0)).to(tl.float32)
    inner = tl.arange(0, CHUNK)
    if empty:
        weights = _target_probs(
            logits_ptr, floats_ptr, ints_ptr, at, every, scale, chunk * CHUNK + inner, VOCAB
        )
    else:
        weights = tl.load(weights_ptr + (row.to(tl.int64) * SPLITS + chunk) * CHUNK + inner)
    ends_inside = tl.cumsum(weights, 0)
    token = tl.minimum(
        tl.min(tl.where((ends_inside > rest) & (weights > 0), inner, CHUNK), 0),
        tl.max(tl.where(weights > 0, inner, 0), 0),
    )
    tl.store(following_ptr + row, chunk * CHUNK + token)
