"""What the tests of clients share: the address of a launch of the bundled pair, and what they ask it."""

import os
from pathlib import Path

import pytest

MODEL = "tiny-target"
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / MODEL


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str:
    """Of the launch that `make test-clients` has started or, in the project's own tests, that of the test run."""
    return os.environ.get("CLIENTS_URL") or request.getfixturevalue("stack").http
