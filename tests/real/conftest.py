"""A launch of the models that `make test-real` names, with the settings that a user gets without flags."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from specahead.engine.loading.tokenizer import load_tokenizer
from tests.stack import Stack, start_stack

READY_SECONDS = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("real models")
    group.addoption("--target", required=True, help="Hugging Face id or folder of an instruct model")
    group.addoption("--draft", required=True, help="a smaller model with the same tokenizer")
    group.addoption("--flags", default="", help="further flags of the launch, in one string")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--target"))


@pytest.fixture(scope="session")
def tokenizer(target: str) -> Any:
    return load_tokenizer(target)


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, target: str) -> Iterator[Stack]:
    draft, flags = request.config.getoption("--draft"), request.config.getoption("--flags")
    own = ("--namespace", "real", "--served-model-name", "real")
    stack = start_stack("--target", target, "--draft", draft, *own, *shlex.split(flags), patience=READY_SECONDS)
    yield stack
    stack.stop(timeout=60)


@pytest.fixture
def client(served: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client
