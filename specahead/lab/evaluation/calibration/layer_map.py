"""SpecAttn, section 3.3 and Algorithm 3: which draft layer's attention is most like each target layer's, in order."""

from torch import Tensor

SMALLEST = 1e-6  # of a block's weight, so that a block that only one model sees costs much, not infinitely much


def layer_similarity(draft: Tensor, target: Tensor) -> Tensor:
    """Eq. 4: minus the KL divergence of each draft layer's block distribution from each target layer's.

    draft: [draft_layers, blocks], target: [target_layers, blocks], both not negative.
    Returns [draft_layers, target_layers] float64.
    """
    log_draft, log_target = (
        ((x.double() + SMALLEST) / (x.double() + SMALLEST).sum(-1, keepdim=True)).log() for x in (draft, target)
    )
    cross = log_draft @ log_target.exp().T  # [draft_layers, target_layers]
    return cross - (log_target.exp() * log_target).sum(-1)


def monotone_map(similarity: Tensor) -> tuple[list[int], float]:
    """The map f of target layers to draft layers that never goes back and has the largest Σ_j S[f(j), j].

    similarity: [draft_layers, target_layers]. Dynamic programming over (draft layer, target layer); draft layers may
    be skipped or used again. Returns f and its score; of equal ones the lowest layers.
    """
    layers = similarity.shape[1]
    best = similarity[:, 0].clone()  # of maps of the first target layers that end at each draft layer
    came_from: list[Tensor] = []
    for j in range(1, layers):
        reached = best.cummax(0)  # the best end at or below each draft layer
        came_from.append(_first_of_equal(best, reached.values))
        best = reached.values + similarity[:, j]
    last = int(best.argmax())
    score = float(best[last])
    path = [last]
    for back in reversed(came_from):
        path.append(int(back[path[-1]]))
    return path[::-1], score


def _first_of_equal(values: Tensor, best: Tensor) -> Tensor:
    """For each running best, the first index that has it."""
    return (values[None] == best[:, None]).long().argmax(1)
