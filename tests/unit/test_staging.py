"""Arrays side by side: what is written on one side is there on the other."""

import numpy as np
import torch

from specahead.engine.staging import Staging

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = {
    "tokens": ((5,), torch.int64),
    "none": ((0, 3), torch.int32),
    "weights": ((2, 3), torch.float32),
    "uniforms": ((3,), torch.float64),
}


def test_both_ways() -> None:
    staging = Staging(LAYOUT, DEVICE)
    assert all(not part.any() for part in staging.host.values())
    for name, (shape, dtype) in LAYOUT.items():
        assert staging.device[name].shape == shape and staging.device[name].dtype == dtype
        assert staging.device[name].data_ptr() % 16 == 0 or not staging.device[name].numel()
    for turn in range(3):
        staging.begin()
        for i, part in enumerate(staging.host.values()):
            part[...] = np.arange(part.size).reshape(part.shape) + 10 * i + turn
        staging.send()
        for i, there in enumerate(staging.device.values()):
            wanted = torch.arange(there.numel()).view(there.shape) + 10 * i + turn
            assert torch.equal(there.cpu(), wanted.to(there.dtype))
    for i, there in enumerate(staging.device.values()):
        there.fill_(i + 7)
    for i, values in enumerate(staging.fetch().values()):
        assert (values == i + 7).all()


def test_nothing_to_stage() -> None:
    staging = Staging({}, DEVICE)
    staging.begin()
    staging.send()
    assert staging.fetch() == {}
