"""Fixed randomness for every unit test, one thread for their small tensors, and which files `make check` leaves out."""

import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.unit.clock import Clock

# Files that take more than about 15 s of a core, the longest first. `make check` leaves them out, and `make test`
# begins with them, so that none runs alone at the end.
SLOW = (
    *("test_tensor_parallel.py", "test_deterministic.py", "test_session_distributions.py", "test_draft_in_target.py"),
    *("test_head.py", "test_compiling.py", "test_chained_steps.py", "test_residency.py", "test_offline.py"),
    *("test_never_a_loss.py", "test_judged_distributions.py", "test_screening.py", "test_self_rounds.py"),
    *("test_minicpm.py", "test_audited_texts.py", "test_packaging.py", "test_offload.py", "test_preemption.py"),
    *("test_architectures.py", "test_paged_attention_triton.py", "test_pass_shapes.py", "test_rejection_triton.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


# A fixture is shared by all examples of a test: a clock goes on, and a target keeps its pages.
SUPPRESSED = HealthCheck.too_slow, HealthCheck.function_scoped_fixture
settings.register_profile("specahead", derandomize=True, deadline=None, database=None, suppress_health_check=SUPPRESSED)
settings.load_profile("specahead")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The `time` of verifier and drafter, which stands still unless it is moved."""
    stopped = Clock()
    for module in ("target_service.verifier", "draft_service.drafter"):
        monkeypatch.setattr(f"{module}.time", stopped)
    return stopped


@pytest.fixture
def every_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of all modules, which passes as it is moved."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock
