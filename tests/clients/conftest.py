"""What the tests of clients share: the address of a launch of the bundled pair, and what they ask it."""

import os
from pathlib import Path

import pytest

MODEL = "tiny-target"
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / MODEL


@pytest.fixture(scope="session")
def url() -> str:
    """Of the launch that `make test-clients` has started."""
    return os.environ["CLIENTS_URL"]
