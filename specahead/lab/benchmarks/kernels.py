"""`specahead bench kernels`: attention and selection on a GPU, replayed in CUDA graphs.

Keys, values and page lists are random. The layers of a step take turns, because the second-level cache would hold the
KV of a single one.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.kernels.paged_attention import (
    Batch,
    BlockLists,
    GroupMeans,
    LayersEvidence,
    paged_attention,
    paged_attention_with_read_weights,
    plan_work,
)
from specahead.lab.benchmarks.gpu_timing import Head, TimedRow, copy_bandwidth, graph_milliseconds, report, require_gpu
from specahead.lab.benchmarks.shapes import GROUP, Shape, read_shape_of
from specahead.lab.benchmarks.small_kernels import gather_rows, selection_rows, verdict_rows

ROTATION_BYTES = 24 << 30  # of KV at most


@dataclass
class Case:
    """Queries of one batch, lists for all layers, and KV for as many layers as fit; the other layers read it again."""

    queries: Tensor
    k_pages: list[Tensor]
    v_pages: list[Tensor]
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    lists: BlockLists  # [layers, sequences, kv_heads, width]
    means: GroupMeans
    shape: Shape
    rows: int  # queries of a sequence

    @property
    def layer_bytes(self) -> int:
        """KV of all sequences in one layer."""
        shape = self.shape
        return 4 * int(self.lengths.sum()) * shape.num_key_value_heads * shape.head_dim


def make_case(shape: Shape, batch: int, context: int, rows: int, share: float) -> Case:
    kv_heads, dim, pages = shape.num_key_value_heads, shape.head_dim, -(-context // PAGE_SIZE)
    count = batch * pages
    layer = 4 * count * PAGE_SIZE * kv_heads * dim
    layers = max(1, min(shape.num_hidden_layers, ROTATION_BYTES // layer))

    def pool() -> list[Tensor]:
        size = (count, kv_heads, PAGE_SIZE, dim)
        return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]

    own = (context - rows) // PAGE_SIZE  # the round's own tokens stand from there on, and are always read
    width = max(pages - own, int(pages * share))
    scores = torch.rand(shape.num_hidden_layers, batch, kv_heads, pages, device="cuda")
    scores[..., own:] = 1
    lists = scores.topk(width, -1).indices.sort(-1).values.int().contiguous()
    counts = torch.full(lists.shape[:3], width, device="cuda", dtype=torch.int32)
    queries = torch.randn(batch * rows, shape.num_attention_heads, dim, device="cuda", dtype=torch.bfloat16)
    return Case(
        queries,
        pool(),
        pool(),
        torch.randperm(count, device="cuda").view(batch, pages).int(),
        torch.full((batch,), context, device="cuda", dtype=torch.int32),
        torch.arange(0, batch * rows + 1, rows, device="cuda", dtype=torch.int32),
        BlockLists(lists, counts, PAGE_SIZE),
        random_means(shape, batch, (context - rows) // GROUP),
        shape,
        rows,
    )


def random_means(shape: Shape, batch: int, groups: int) -> GroupMeans:
    size = batch * groups, shape.num_key_value_heads, shape.head_dim
    k, v, variance = (torch.rand(size, device="cuda") for _ in range(3))
    tables = torch.arange(batch * groups, device="cuda", dtype=torch.int32).view(batch, groups)
    counts = torch.full((batch,), groups, device="cuda", dtype=torch.int32)
    return GroupMeans(k, v, variance, tables, counts, GROUP)


def time_attention(case: Case, what: str, repeats: int) -> float:
    """Return the milliseconds of one layer.

    what: dense; emitting: dense, with weights of blocks; sparse; means: sparse, with group means for unread blocks;
    weighing: sparse, with weights of the listed blocks.
    """
    shape, scale = case.shape, case.shape.head_dim**-0.5
    group = shape.num_attention_heads // shape.num_key_value_heads
    sparse = what in ("sparse", "means", "weighing")
    means = case.means if what == "means" else None
    layers = shape.num_hidden_layers
    sums = torch.zeros(len(case.lengths), layers, shape.num_attention_heads, case.tables.shape[1], device="cuda")

    def work() -> None:
        evidence = LayersEvidence(sums, 1.0, PAGE_SIZE, 1, None, backend="triton")
        blocks = case.lists if sparse else None
        plan = plan_work(
            shape.num_key_value_heads,
            group,
            shape.head_dim,
            case.rows,
            case.tables,
            case.lengths,
            PAGE_SIZE,
            blocks,
            means,
        )
        for i in range(layers):
            pages = case.k_pages[i % len(case.k_pages)], case.v_pages[i % len(case.v_pages)]
            batch = Batch(case.queries, *pages, case.tables, case.lengths, case.starts, scale, case.rows)
            if what == "dense":
                paged_attention(batch, backend="triton", work=plan)
            elif what == "emitting":
                evidence.attend(i, batch, None, plan)
            else:
                here = BlockLists(case.lists.lists[i], case.lists.counts[i], PAGE_SIZE)
                weighing = what == "weighing"
                kernel: Callable[..., object] = paged_attention_with_read_weights if weighing else paged_attention
                kernel(batch, here, means, backend="triton", work=plan.layer(i))

    return graph_milliseconds(work, repeats) / layers


def run(flags: argparse.Namespace) -> None:
    """Measure, print the table, and write it to the JSON file if one is named. Raises ValueError without a GPU."""
    require_gpu()
    shape, rows, share, repeats = read_shape_of(flags.shape), flags.queries, flags.share, flags.repeats
    bandwidth = copy_bandwidth()
    table: list[TimedRow] = []
    for batch in flags.batch:
        for context in flags.context:
            name = f"{batch} x {context}"
            case = make_case(shape, batch, context, rows, share)
            reads = {"dense": 1.0, "emitting": 1.0} | dict.fromkeys(("sparse", "means", "weighing"), share)
            for what, read in reads.items():
                size = int(case.layer_bytes * read)
                ms = time_attention(case, what, repeats)
                table.append(TimedRow(f"attention {what}, {name}", ms, 1e3 * size / bandwidth, None))
            del case
            torch.cuda.empty_cache()
    table += selection_rows(bandwidth, repeats)
    table += verdict_rows(bandwidth, repeats, shape.vocab_size, rows - 1)
    table += gather_rows(repeats)
    command = f"specahead bench kernels --shape {flags.shape} --batch {' '.join(map(str, flags.batch))} "
    command += f"--context {' '.join(map(str, flags.context))} --queries {rows} --share {share}"
    head = Head.here(command, bandwidth)
    print(report(head, table, "rival: torch.sort"))
    if flags.json:
        head.write(flags.json, table)
