"""Fixed randomness for every unit test, and one thread for their small tensors."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.unit.clock import Clock

settings.register_profile(
    "specahead", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("specahead")


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The verifier's `time`, which stands still unless it is moved."""
    stopped = Clock()
    monkeypatch.setattr("target_service.verifier.time", stopped)
    return stopped
