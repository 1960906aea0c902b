"""Which KV pages are in the GPU's cache lines: their tables, and the clock that decides whose line a page gets.

A row of the tables is a layer, whose heads share a fixed number of cache lines on the GPU. Every page of a head (16
tokens of one KV head) has a place in the backing store, pinned host memory. Layers agree on pages: head h of page p is
p * kv_heads + h in every row. A layer's memory is [GPU pages, kv_heads, 16, dim], and a cache line is GPU page *
kv_heads + head. New KV is written into whole GPU pages; once it is stored, the clock may take the lines one by one, and
a line may get any head's page.

The clock is the one of Multics (Corbató, "A Paging Experiment with the Multics System", MIT Project MAC, 1968), also
called second chance. It is defined line by line, and Triton does exactly that in chunks: within a sweep a
line's fate depends on its own state and on how many victims lie before it, which is a prefix sum. Chunk sizes change
nothing.

- The hand looks at lines in turn. A line that the round needs, or that is dirty, is passed over untouched. A set bit is
  cleared and the line passed over. Any other line, free or not, is the next victim.
- It stops after the last victim that is needed, else after two sweeps: then all bits it could clear are cleared.
- A page gets its bit when it is a hit, not when it is placed: pages wanted only once go first.

All operations are kernels without a host round trip: they may be captured in a CUDA graph. Calls on one set of tables
must follow each other (one stream). Lists are of blocks, which are runs of a sequence's pages; numbers outside of a
table (say, -1) count as not listed.

`tables` holds the tables. `request` brings the blocks that a step lists into cache lines, in Triton by
`request_kernels`; `find` looks up lines and counts blocks that are not wholly there; `placement` pins, stores and drops
pages. Each has its torch twin.
"""

from specahead.kernels.residency.find import count_missing_blocks, find_block_lines
from specahead.kernels.residency.placement import drop_pages, mark_stored, pin_gpu_pages
from specahead.kernels.residency.request import request_blocks
from specahead.kernels.residency.tables import ListedBlocks, ResidencyTables, Transfers, clear_tables, empty_tables

__all__ = [
    "ListedBlocks",
    "ResidencyTables",
    "Transfers",
    "clear_tables",
    "count_missing_blocks",
    "drop_pages",
    "empty_tables",
    "find_block_lines",
    "mark_stored",
    "pin_gpu_pages",
    "request_blocks",
]
