"""Embeddings of tokens in float32, as a residual that is added to begins."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import check_backend, follow, jit, overlapping_launch, power_of_two, tl


def embed_in_float32(token_ids: Tensor, embedding: Tensor, scale: float = 1.0, backend: str = "torch") -> Tensor:
    """Return scale * embedding[token_ids], [rows, hidden] float32.

    token_ids: [rows] int64; embedding: [vocab, hidden]
    """
    check_backend("embed_in_float32", backend)
    if backend == "torch":
        return scale * F.embedding(token_ids, embedding).float()
    rows, hidden = len(token_ids), embedding.shape[1]
    out = torch.empty(rows, hidden, dtype=torch.float32, device=token_ids.device)
    _embed_kernel[(rows,)](
        *(token_ids, embedding, out, hidden, scale),
        SIZE=power_of_two(hidden),
        num_warps=4,
        **overlapping_launch(token_ids.device),
    )
    return out


@jit
def _embed_kernel(
    token_ids_ptr,
    embedding_ptr,
    out_ptr,
    hidden: tl.constexpr,
    scale: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    follow(PDL)  # what the layers' kernels read before they wait is there
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    numbers = tl.load(embedding_ptr + token * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden + at, numbers * scale, mask=at < hidden)
