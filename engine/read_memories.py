"""The remembered weights of many sequences in one tensor, so that a captured pass finds each by its index."""

import weakref

import torch
from torch import Tensor

from engine.inputs import ReadMemory


class ReadMemories:
    """Room for the weights of `sequences` sequences, made with the first pass that needs it."""

    def __init__(self, sequences: int) -> None:
        self._free = list(range(sequences - 1, -1, -1))
        self._weights: Tensor | None = None

    @property
    def made(self) -> bool:
        return self._weights is not None

    def weights(self, rows: int, blocks: int, device: torch.device) -> Tensor:
        """Return the tensor of all: [sequences, rows, blocks] float32."""
        if self._weights is None:
            self._weights = torch.zeros(len(self._free), rows, blocks, device=device)
        return self._weights

    def index_of(self, memory: ReadMemory) -> int:
        """Return the index of a sequence's memory: given with its first pass, free again when `memory` is dropped.

        Raises RuntimeError if there is no room for one more.
        """
        if memory.index is None:
            assert self._weights is not None
            if not self._free:
                raise RuntimeError(f"{len(self._weights)} sequences share budgets out: keep more memories")
            memory.index = self._free.pop()
            self._weights[memory.index].zero_()
            weakref.finalize(memory, self._free.append, memory.index)
        return memory.index
