"""Types of fields that may be as long as a body.

Their check ends soon after the first fault. Otherwise pydantic would describe each of a million faults, which holds the
event loop up for half a minute and takes gigabytes, and a client gets one of them.
"""

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import Field, WrapValidator

_PART = 100  # entries of an object that are checked together

K = TypeVar("K")
V = TypeVar("V")


def _check_in_parts(value: Any, check: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
    """Return an object whose entries are checked _PART at a time. Raises the error of the first wrong part."""
    if not isinstance(value, dict):
        return check(value)
    entries, checked = iter(value.items()), check({})
    while part := dict(islice(entries, _PART)):
        checked |= check(part)
    return checked


Items = Annotated[list[V], Field(fail_fast=True)]
Models = Annotated[list[V], Field(fail_fast=True, max_length=8192)]  # each takes some 10 µs
Entries = Annotated[dict[K, V], WrapValidator(_check_in_parts)]
