"""The order of the test files, and the fixtures that they share. Two files run at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from openai import OpenAI

from specahead.engine.loading.model import load_module
from specahead.models import TARGET
from tests.stack import Stack

# The longest files begin first, so that none of them runs alone at the end.
LONGEST = (
    *("test_failures.py", "test_exact_greedy.py", "test_tensor_parallel.py", "test_approximate.py", "test_cli.py"),
    *("test_apart.py", "test_offload.py", "test_precision.py", "test_access.py", "test_handshake.py"),
    *("test_sampling.py", "test_calibrate.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[OpenAI]:
    """OpenAI's own client of the shared launch."""
    with OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def target_module() -> Any:
    """The bundled target as transformers runs it, in float32."""
    return load_module(str(TARGET), torch.float32, "cpu", "sdpa")
