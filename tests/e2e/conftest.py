"""The order of the files, two of which run at a time."""

import pytest

# What takes longest begins first, so that nobody waits for it at the end.
LONGEST = (
    *("test_exact_greedy.py", "test_failures.py", "test_placement.py", "test_offload.py", "test_apart.py"),
    *("test_sampling.py", "test_cli.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
