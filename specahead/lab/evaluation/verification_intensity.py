"""`specahead evaluate sharing --intensity`: operations for each byte that a verification reads, from sizes alone.

It repeats table 1 and figure 1 of MatX's "Speculative Decoding with Blockwise Sparse Attention" (2025) for native
sparse attention (arXiv 2502.11089). At best all tokens of a round share the selection of the first one. At worst no two
of them select the same block. As in figure 1, batches are so large that reading the weights costs next to nothing.
"""

import argparse
from dataclasses import dataclass

from specahead.lab.results import Columns, text_table, to_json

CONTEXTS = 8192, 16384, 32768, 65536  # tokens; those of table 1


@dataclass(frozen=True)
class NativeSparseSizes:
    """Sizes of a model in 16 bits. The defaults are those of MatX's figure 1 and of the model in NSA's paper."""

    active_parameters: float = 3e9
    layers: int = 30
    heads: int = 64
    kv_heads: int = 4
    key_dim: int = 192
    value_dim: int = 128
    stride: int = 16
    """Tokens from one compressed key to the next one."""
    selected: int = 16 * 64
    """Tokens of the blocks that a token selects: 16 blocks of 64."""
    window: int = 512
    """Tokens of the sliding window."""


@dataclass(frozen=True)
class IntensityRow:
    """The intensity of verifying a round: at best, with a shared selection, and at worst, with disjoint ones."""

    context: int
    """Tokens before the verified ones."""
    tokens: int
    """Verified tokens: the drafted ones, and one more."""
    keys_shared: int
    """Keys that a KV head reads, with a shared selection."""
    keys_apart: int
    """The same with disjoint selections."""
    flops_shared: float
    """Floating-point operations for each byte of KV that is read, with a shared selection."""
    flops_apart: float
    """The same with disjoint selections."""


def intensity(sizes: NativeSparseSizes, context: int, tokens: int) -> IntensityRow:
    """Return the row of a context, in tokens, and a number of verified tokens.

    A token takes two operations for each active parameter, and two for each element of the keys and values that its
    query heads attend to. Which token selected them makes no difference.
    """
    beside = context // sizes.stride + sizes.window
    shared, apart = beside + sizes.selected, beside + min(tokens * sizes.selected, context)
    of_layers = sizes.layers * (sizes.key_dim + sizes.value_dim)
    flops = tokens * 2 * (sizes.active_parameters + of_layers * sizes.heads * shared)
    key_bytes = 2 * of_layers * sizes.kv_heads
    return IntensityRow(context, tokens, shared, apart, flops / (shared * key_bytes), flops / (apart * key_bytes))


def run(flags: argparse.Namespace) -> None:
    """Print the rows of all contexts and of the numbers of tokens in --shared."""
    counts = [count for count in flags.shared if count]
    rows = [intensity(NativeSparseSizes(), context, count) for context in CONTEXTS for count in counts]
    print(to_json(rows) if flags.json else text_table(COLUMNS, rows, left=0))


COLUMNS: Columns[IntensityRow] = {
    "context": lambda row: f"{row.context:,}",
    "k": lambda row: f"{row.tokens - 1}",
    "keys, shared": lambda row: f"{row.keys_shared:,}",
    "keys, apart": lambda row: f"{row.keys_apart:,}",
    "FLOP a byte, shared": lambda row: f"{row.flops_shared:.0f}",
    "FLOP a byte, apart": lambda row: f"{row.flops_apart:.0f}",
    "ratio": lambda row: f"{row.flops_shared / row.flops_apart:.2f}",
}
