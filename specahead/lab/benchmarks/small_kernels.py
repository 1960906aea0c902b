"""Rows of `specahead bench kernels` that are not attention: selection, verdicts, gathering from the host."""

from functools import partial

import torch

from specahead.kernels.kv_gather import gather_blocks
from specahead.kernels.rejection import DraftedRows, judge_greedy, judge_sampled
from specahead.kernels.selection import select_over_rows, select_top_k
from specahead.lab.benchmarks.gpu_timing import TimedRow, copy_milliseconds, graph_milliseconds

GATHER_PROGRAMS = (4, 8, 16, 32, 64)
HOST_BYTES = 2 << 30  # of pinned memory that is gathered from


def selection_rows(bandwidth: float, repeats: int) -> list[TimedRow]:
    """A budget shared out over 256 rows of a sequence, and 128 rows each by itself; against torch.sort of as much."""
    table = []
    for groups, rows, n in ((8, 256, 6400), (1, 256, 6400)):
        scores = torch.rand(groups, rows, n, device="cuda")
        counts = torch.full((groups,), rows * n // 10, dtype=torch.int32, device="cuda")
        ms = graph_milliseconds(partial(select_over_rows, scores, counts, backend="triton"), repeats)
        theirs = graph_milliseconds(partial(torch.sort, scores.flatten(1), descending=True), repeats)
        name = f"top tenth of {groups} x {rows} x {n}"
        table.append(TimedRow(name, ms, 1e3 * scores.nbytes / bandwidth, theirs))
    for n in (2048, 8192, 32768, 131072):
        # As attention is: a few blocks hold most of it.
        weights = (8 * torch.rand(128, n, device="cuda")).exp()
        valid = torch.full((128,), n, dtype=torch.int32, device="cuda")
        theirs = graph_milliseconds(partial(torch.sort, weights, descending=True), repeats)
        floor = 1e3 * weights.nbytes / bandwidth
        top = partial(select_top_k, weights, valid, valid // 10, "triton", n // 10)
        table.append(TimedRow(f"rows' top tenth, 128 x {n}", graph_milliseconds(top, repeats), floor, theirs))
    return table


def verdict_rows(bandwidth: float, repeats: int, vocab: int, gamma: int) -> list[TimedRow]:
    """Greedy and sampled verdicts on bf16 logits; sampled at temperature 0.8 and top_p 0.9, of 64 draft entries."""
    table = []
    for rows in (1, 8):
        logits = torch.randn(rows, gamma + 1, vocab, device="cuda", dtype=torch.bfloat16)
        floor = 1e3 * logits.nbytes / bandwidth
        probs, ids = logits[:, :gamma].float().softmax(-1).topk(64)
        tokens, counts = ids[..., 0].int(), torch.full((rows,), gamma, device="cuda", dtype=torch.int32)
        greedy = partial(judge_greedy, logits, tokens, counts, "triton")
        table.append(
            TimedRow(f"verdicts greedy, {rows} x {gamma + 1}", graph_milliseconds(greedy, repeats), floor, None)
        )
        support = ids.int(), probs / probs.sum(-1, keepdim=True)
        temperature, top_p = (torch.full((rows,), value, device="cuda") for value in (0.8, 0.9))
        uniforms = (torch.rand(rows, gamma + i, device="cuda", dtype=torch.float64) for i in (0, 1))
        drafted = DraftedRows(tokens, counts, *support, temperature, top_p, *uniforms)
        sampled = partial(judge_sampled, logits, drafted, "triton")
        table.append(
            TimedRow(f"verdicts sampled, {rows} x {gamma + 1}", graph_milliseconds(sampled, repeats), floor, None)
        )
    return table


def gather_rows(repeats: int) -> list[TimedRow]:
    """Scattered blocks of 4 KB from pinned host memory, by how many programs; floor: one bulk copy of as much."""
    size = 4096
    host = torch.empty(2, HOST_BYTES // size // 2, size, dtype=torch.uint8, pin_memory=True)  # keys and values
    rows = host.shape[1] // 8
    device = torch.empty(2, rows, size, dtype=torch.uint8, device="cuda")
    chosen = torch.randperm(host.shape[1], device="cuda")[:rows].int()
    places = torch.arange(rows, device="cuda", dtype=torch.int32)
    counts = torch.tensor([rows], device="cuda", dtype=torch.int32)
    bulk = copy_milliseconds(host.flatten(0, 1)[: 2 * rows], device.flatten(0, 1), repeats)
    sides = (host[0], host[1]), (device[0], device[1])
    table = []
    for programs in GATHER_PROGRAMS:
        work = partial(gather_blocks, *sides, chosen, places, counts, programs, "triton")
        ms = graph_milliseconds(work, repeats)
        link = device.nbytes / bulk * 1e3
        table.append(TimedRow(f"gather {2 * rows} x 4 KB from the host, {programs} programs", ms, bulk, None, link))
    return table
