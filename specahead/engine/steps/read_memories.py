"""What the last reads of many sequences left, in one tensor, so that captured launches find each by its index."""

import weakref

import torch
from torch import Tensor

from specahead.engine.kv.pages import LastChoice
from specahead.engine.steps.inputs import ReadMemory


class ReadMemories:
    """Room for the weights or the choices of `sequences` sequences, made with the first pass that needs it.

    Sequences whose plans differ in sparse heads or block size are kept in tensors of their own.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._free = list(range(sequences - 1, -1, -1))
        self._weights: dict[tuple[int, int], Tensor] = {}  # by rows and blocks
        self._choices: Tensor | None = None

    @property
    def made(self) -> bool:
        return bool(self._weights) or self._choices is not None

    def weights(self, rows: int, blocks: int, device: torch.device) -> Tensor:
        """Return the tensor of all sequences with these sizes: [sequences, rows, blocks] float32."""
        if (rows, blocks) not in self._weights:
            self._weights[rows, blocks] = torch.zeros(self._sequences, rows, blocks, device=device)
        return self._weights[rows, blocks]

    def choices(self, layers: int, kv_heads: int, width: int, device: torch.device) -> Tensor:
        """Return the blocks that the layers of a model which chooses by itself chose last (LastChoices.blocks)."""
        if self._choices is None:
            sizes = self._sequences + 1, layers, kv_heads, width
            self._choices = torch.full(sizes, -1, dtype=torch.int32, device=device)
        return self._choices

    def index_of(self, memory: ReadMemory | LastChoice) -> int:
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
        if self._choices is not None:
            self._choices[index] = -1
