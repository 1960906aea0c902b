"""A pytest plugin: what vLLM's tests import of vLLM, with a launch of ours in the place of its server."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest

from specahead.config.version import running_version
from specahead.engine.loading.config import load_shape
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.models import TARGET
from tests.stack import Stack, start_stack
from tests.vllm_openai.exclusions import EXCLUDED

LIMIT = 500  # tokens of a chat that asks for no limit
_running: dict[str, Stack] = {}  # launches by their context


class RemoteOpenAIServer:
    """Stands in for vLLM's class of this name: a launch with the context that the arguments name, or the server at
    CLIENTS_URL if there is one. All else that the arguments say is vLLM's own affair."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, arguments: Sequence[str], **_: Any) -> None:
        given = dict(pairwise(arguments))
        context = given.get("--max-model-len") or given.get("--max_model_len", "8192")
        self.url_root = os.environ.get("CLIENTS_URL", "")
        if self.url_root:
            return
        if context not in _running:
            flags = ("--max-model-len", context, "--tool-call-parser", "hermes", "--logging", '{"level": "warning"}')
            _running[context] = start_stack("--namespace", f"vllm-{context}", *flags)
        self.url_root = _running[context].http

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        """The launch stays for the next file."""

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return _limited(openai.OpenAI(**self._options(options)))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return _limited(openai.AsyncOpenAI(**self._options(options)))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url_for("v1"), "api_key": "none", "max_retries": 0, "timeout": 600} | options


def _limited(client: Any) -> Any:
    """Return a client whose chats have a limit, and whose responses end with a sentence: the bundled model hardly ends
    by itself."""
    create, respond = client.chat.completions.create, client.responses.create

    def create_limited(**fields: Any) -> Any:
        limited = {"max_tokens", "max_completion_tokens"} & set(fields)
        return create(**fields if limited else fields | {"max_tokens": LIMIT})

    def respond_briefly(**fields: Any) -> Any:
        return respond(**fields if "max_output_tokens" in fields else fields | {"extra_body": {"stop": "."}})

    client.chat.completions.create, client.responses.create = create_limited, respond_briefly
    return client


def get_tokenizer(*_: object, **__: object) -> Any:
    """Return the tokenizer of the model that is served."""
    return load_tokenizer(str(TARGET))


def _vocab_size() -> int:
    return load_shape(str(TARGET)).vocab_size


# What tests that apply use of vLLM's modules.
_KNOWN: dict[str, dict[str, Any]] = {
    "vllm": {"envs": SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)},
    "vllm.config": {"ModelConfig": lambda **_: SimpleNamespace(get_vocab_size=_vocab_size)},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": lambda: SimpleNamespace(snapshot_download=lambda **_: "")},
    "vllm.version": {"__version__": running_version()},
}


class _StandIn(ModuleType):
    """A module of vLLM's of which only the names are needed: tests that use what they name are excluded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        ours = name.split(".")[0] == "vllm"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_KNOWN.get(module.__name__, {}))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Have imports of vLLM's modules find what stands in for them, those of its conftests, too."""
    sys.meta_path.append(_Finder())
    utils = ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils


def pytest_unconfigure() -> None:
    for stack in _running.values():
        stack.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is excluded. Raises UsageError for an exclusion of what is not there."""
    unused = set(EXCLUDED)
    for item in items:
        for name in {item.nodeid, item.nodeid.partition("[")[0]} & set(EXCLUDED):
            item.add_marker(pytest.mark.skip(reason=EXCLUDED[name]))
            unused.discard(name)
        if "-lora" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="there are no LoRA adapters"))
    files = {item.nodeid.partition("::")[0] for item in items}
    stale = sorted(name for name in unused if name.partition("::")[0] in files)
    if stale:
        raise pytest.UsageError(f"excluded, but not there: {', '.join(stale)}")
