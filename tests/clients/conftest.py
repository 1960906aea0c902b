"""Shared by the tests of clients: the address of a launch of the bundled pair, its model and its tokenizer."""

import os
from pathlib import Path

import pytest

MODEL = "tiny-target"
ENOUGH = 600  # tokens for a small object without further properties; the bundled model writes much white space
TOKENIZER = Path(__file__).resolve().parents[2] / "specahead" / "models" / MODEL


@pytest.fixture(scope="session")
def url() -> str:
    """The address of the launch that `make test-clients` has started."""
    return os.environ["CLIENTS_URL"]
