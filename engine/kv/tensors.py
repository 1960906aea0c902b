"""How KV tensors are allocated."""

import math

import numpy as np
import torch
from torch import Tensor


def kv_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros, because what is masked still takes part in 0 * value. On a CPU they take memory when written."""
    if torch.device(device).type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
