"""The remembered weights of many sequences in one tensor, so that captured launches find each by its index."""

import weakref

import torch
from torch import Tensor

from specahead.engine.steps.inputs import ReadMemory


class ReadMemories:
    """Room for the weights of `sequences` sequences, made with the first pass that needs it.

    Sequences whose plans differ in sparse heads or block size are kept in tensors of their own.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._free = list(range(sequences - 1, -1, -1))
        self._weights: dict[tuple[int, int], Tensor] = {}  # by rows and blocks

    @property
    def made(self) -> bool:
        return bool(self._weights)

    def weights(self, rows: int, blocks: int, device: torch.device) -> Tensor:
        """Return the tensor of all sequences with these sizes: [sequences, rows, blocks] float32."""
        if (rows, blocks) not in self._weights:
            self._weights[rows, blocks] = torch.zeros(self._sequences, rows, blocks, device=device)
        return self._weights[rows, blocks]

    def index_of(self, memory: ReadMemory) -> int:
        """Return the index of a sequence's memory: given with its first pass, free again when `memory` is dropped.

        Raises RuntimeError if there is no room for one more.
        """
        if memory.index is None:
            if not self._free:
                raise RuntimeError(f"the reads of {self._sequences} sequences are remembered: keep more memories")
            memory.index = self._free.pop()
            self.clear(memory.index)
            weakref.finalize(memory, self._free.append, memory.index)
        return memory.index

    def clear(self, index: int) -> None:
        """Have nothing remembered of the sequence of this index."""
        for weights in self._weights.values():
            weights[index].zero_()
