"""What the tests of clients share: the address of a launch of the bundled pair, and what they ask it."""

import os
from pathlib import Path

import pytest

MODEL = "tiny-target"
ENOUGH = 600  # tokens for a small object without further properties: the bundled model is fond of white space
TOKENIZER = Path(__file__).resolve().parents[2] / "specahead" / "models" / MODEL


@pytest.fixture(scope="session")
def url() -> str:
    """Of the launch that `make test-clients` has started."""
    return os.environ["CLIENTS_URL"]
