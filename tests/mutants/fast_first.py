"""A plugin of pytest's: what a run without a mutant has found quick goes first in those with mutants.

So most mutants are killed within a second, and a test that a mutant makes wait for ever is not waited for long.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

LEAST_SECONDS, TIMES = 10.0, 10  # what a test may take with a mutant: so many times what it took without


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", type=Path, help="write what each test takes into this file")
    parser.addoption("--read-seconds", type=Path, action="append", help="what each test took: the quick ones go first")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_seconds"):
        config.pluginmanager.register(_Clock(config.getoption("write_seconds")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files: list[Path] = config.getoption("read_seconds") or []
    seconds = {test: taken for file in files for test, taken in json.loads(file.read_text()).items()}
    items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))
    for item in items if files else []:
        item.add_marker(pytest.mark.timeout(max(LEAST_SECONDS, TIMES * seconds.get(item.nodeid, 0.0))))


class _Clock:
    """Adds up what tests take, their fixtures included, and writes it down at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._seconds))
