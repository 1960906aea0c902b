"""Group means in Triton (on a GPU, or interpreted) against the reference, and that against float64."""

import pytest
import torch
from torch import Tensor

from specahead.kernels.group_means import make_group_means
from specahead.kernels.kv_scales import values_by_token

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(
    layers: int, dim: int, per_group: int, dtype: torch.dtype, backend: str
) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(layers + dim)
    size = (12, 2, 16, dim)
    pools = [(torch.randn(size, generator=random) * 3 + 1).to(DEVICE, dtype) for _ in range(2 * layers)]
    pages = torch.randperm(12, generator=random)[: 2 * per_group].view(2, per_group)
    slots = torch.tensor([4, 1])
    means = [torch.full((layers, 6, 2, dim), 7.0, device=DEVICE) for _ in range(3)]
    k_pages, v_pages = (
        pools[:layers],
        [values_by_token(pages).contiguous() for pages in pools[layers:]],
    )  # as they lie there
    make_group_means(k_pages, v_pages, pages.to(DEVICE), slots.to(DEVICE), *means, backend)
    return pools, pages, slots, means


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("layers", "dim", "per_group"), [(1, 16, 1), (3, 24, 4)])
def test_means_and_variances(layers: int, dim: int, per_group: int, dtype: torch.dtype, backend: str) -> None:
    pools, pages, slots, (k, v, k_variance) = made(layers, dim, per_group, dtype, backend)
    for layer in range(layers):
        for group, slot in zip(pages, slots, strict=True):
            keys, values = (
                pools[place][group.to(DEVICE)].double().transpose(0, 1).flatten(1, 2)
                for place in (layer, layers + layer)
            )
            exact = keys.mean(1), values.mean(1), keys.var(1, correction=0)
            for got, wanted in zip((k, v, k_variance), exact, strict=True):
                torch.testing.assert_close(got[layer, slot].double(), wanted, rtol=1e-5, atol=1e-5)
    others = [slot for slot in range(6) if slot not in slots]
    assert all(bool((part[:, others] == 7).all()) for part in (k, v, k_variance))
