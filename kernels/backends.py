"""Which implementation of an operation runs. Only `torch` is built so far; asking for another is an error."""

from typing import Literal

Backend = Literal["torch"]


def check_backend(operation: str, backend: str) -> None:
    """Raise NotImplementedError for a backend that `operation` does not have."""
    if backend != "torch":
        raise NotImplementedError(f"{operation}: backend {backend!r} is not built; the only one is 'torch'")
