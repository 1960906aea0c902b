"""Where the variable CI is set in the environment, no test may skip, but for a GPU that is there or is not.

The two functions are hooks of pytest. tests/conftest.py imports them.
"""

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

# What a reason has to name. Elsewhere, too, each skip is said at the end of a run (-rs in pyproject.toml).
HARDWARE = re.compile(r"\b(GPU|CUDA)\b")


def _refuse(report: Any) -> Any:
    if report.skipped and isinstance(report.longrepr, tuple) and os.environ.get("CI"):
        reason = report.longrepr[2]
        if not HARDWARE.search(reason):
            report.outcome, report.longrepr = "failed", f"nothing may be skipped where CI is set. {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse((yield))
