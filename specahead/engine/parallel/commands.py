"""What rank 0 tells the ranks that follow it: flat numbers and the bytes of arrays, never pickled objects.

A message is int64 numbers: a command, and what it takes. The inputs of a step come from rank 0's device, within the
step (`Ranks.share`), so a message stays small, however long contexts are. Those of a pass of its exact size, which the
host of every rank looks at, follow its message, as `Staging` lays them out in host memory.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from multiprocessing.connection import Connection
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from specahead.engine.steps.shapes import PassShape


class Command(IntEnum):
    """What a rank is to do, beside what its numbers say."""

    STEP = 0
    """Run the step of a shape. Numbers: the shape."""
    EXACT = 1
    """Run a pass of its exact size. Numbers: the rows that give logits; of sequences that are brought together for the
    pass, their count, each one's count of pages, and all their pages; the shape. Its inputs follow."""
    CAPTURE = 2
    """Make the step of a shape ready. Numbers: whether it is to stay (1 or 0), the shape."""
    PLAN_PROMPT = 3
    """Have cuDNN plan one shape of prompts. Numbers: own tokens, tokens before."""
    CAPTURE_PROMPT = 4
    """Capture the layers of passes over prompts. Numbers: how many tokens."""
    MAKE_MEANS = 5
    """Make the means of groups. Numbers: pages of a group, the slots of the means, the GPU pages of all groups."""
    KEEP_MEANS = 6
    """Make room for group means. Numbers: tokens of a group, slots."""
    KEEP_MEMORIES = 7
    """Make room for the memories of sequences. Numbers: how many."""
    CLEAR_MEMORY = 8
    """Clear the memory of a sequence. Numbers: its index."""
    SCRUB = 9
    """Zero pages. Numbers: the pages."""
    IMPOSE = 10
    """Replace the last step's verdicts. Numbers: three of each sequence."""
    LEAVE = 11
    """Leave the group of ranks, as rank 0 does, and end."""

    # KV in tiers.
    CLEAR_TABLES = 12
    """Empty all cache lines."""
    PIN_PAGES = 13
    """Keep the pages that a round writes in their GPU pages. Numbers: the round, the pages, their GPU pages."""
    LEAVE_TO_CLOCK = 14
    """Leave the cache lines of stored pages to the clock. Numbers: the pages."""
    DROP_PAGES = 15
    """Free the cache lines of pages. Numbers: the pages."""
    STORE_PAGES = 16
    """Start to copy pages to the backing store. Numbers: the pages, their GPU pages."""
    END_COPY = 17
    """Have the device wait for the oldest copy that STORE_PAGES has started."""
    MAKE_STAGED_MEANS = 18
    """Make the means of groups from pages that are first brought together. Numbers: pages of a group, the slots of the
    means, the pages of all groups."""


class Followers:
    """The ranks that follow this one, each at the other end of a pipe. Without any, nothing is sent."""

    def __init__(self, connections: Sequence[Connection] = ()) -> None:
        self._connections, self._lock = connections, threading.Lock()

    def tell(self, command: Command, numbers: Sequence[int] = (), inputs: np.ndarray | None = None) -> None:
        """Send a command with its numbers, and the inputs of a pass if it has any, to every rank.

        Raises OSError if a rank is gone.
        """
        if not self._connections:
            return
        message = np.array([command, *numbers], np.int64)
        with self._lock:  # the event loop tells, too, between steps
            for connection in self._connections:
                connection.send_bytes(message.data)
                if inputs is not None:
                    connection.send_bytes(inputs.data)

    def tell_step(self, shape: PassShape) -> None:
        """Have the step of a shape run on every rank."""
        if self._connections:
            self.tell(Command.STEP, encode(shape))

    def tell_exact(self, shape: PassShape, inputs: np.ndarray, logits_rows: int, pages: Sequence[np.ndarray]) -> None:
        """Have a pass of its exact size run on every rank.

        logits_rows: how many rows give logits. pages: the pages, int32 [pages], of each sequence that is brought
        together for the pass.
        """
        if self._connections:
            numbers = [logits_rows, len(pages), *map(len, pages), *(page for each in pages for page in each.tolist())]
            self.tell(Command.EXACT, [*numbers, *encode(shape)], inputs)


NOBODY = Followers()


# Shapes as numbers: their fields in order. A field that may be None is preceded by 0 or 1, a tuple by its length.


@lru_cache(4096)
def encode(shape: PassShape) -> tuple[int, ...]:
    """Return a shape as numbers of int64."""
    return tuple(_numbers(shape, PassShape))


@lru_cache(4096)
def decode(numbers: tuple[int, ...]) -> PassShape:
    """Return the shape that `encode` gave these numbers for. Raises ValueError if there are more."""
    rest = iter(numbers)
    shape: PassShape = _value(rest, PassShape)
    if next(rest, None) is not None:
        raise ValueError(f"{len(numbers)} numbers are more than a PassShape has: do all ranks run the same release?")
    return shape


def _numbers(value: Any, kind: Any) -> Iterator[int]:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        for field in fields(kind):
            yield from _numbers(getattr(value, field.name), hints[field.name])
    elif get_origin(kind) is UnionType:
        yield int(value is not None)
        if value is not None:
            yield from _numbers(value, get_args(kind)[0])
    elif get_origin(kind) is tuple:
        yield len(value)
        yield from value
    elif kind is float:
        yield struct.unpack("<q", struct.pack("<d", value))[0]
    else:
        yield int(value)


def _value(numbers: Iterator[int], kind: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{field.name: _value(numbers, hints[field.name]) for field in fields(kind)})
    if get_origin(kind) is UnionType:
        return _value(numbers, get_args(kind)[0]) if next(numbers) else None
    if get_origin(kind) is tuple:
        return tuple(next(numbers) for _ in range(next(numbers)))
    if kind is float:
        return struct.unpack("<d", struct.pack("<q", next(numbers)))[0]
    return kind(next(numbers))


@lru_cache(16)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
