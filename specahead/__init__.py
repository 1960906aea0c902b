"""Serving with a draft that announces KV blocks and a target that verifies: what its services share.

`specahead.LLM` generates from Python, without a server.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specahead.offline import LLM, Output, SamplingParams

__all__ = ["LLM", "Output", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import what runs models when it is asked for: commands and services import this package for its settings."""
    if name not in __all__:
        raise AttributeError(f"module 'specahead' has no attribute {name!r}")
    from specahead import offline

    return getattr(offline, name)
