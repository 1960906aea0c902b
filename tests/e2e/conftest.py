"""The order of the test files, and the fixtures that they share. Two files run at a time."""

import pytest

# The longest files begin first, so that none of them runs alone at the end.
LONGEST = (
    *("test_failures.py", "test_exact_greedy.py", "test_tensor_parallel.py", "test_approximate.py", "test_apart.py"),
    *("test_offload.py", "test_handshake.py", "test_eight_bit.py", "test_cli.py", "test_access.py", "test_sampling.py"),
    *("test_calibrate.py", "test_bfloat16.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
