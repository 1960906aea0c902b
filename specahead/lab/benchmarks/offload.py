"""`specahead bench offload`: verification steps over KV in tiers against the same steps over KV wholly on the GPU.

Each step reads what one round of the real services read (read_trace.py), and it is timed in three ways:

    resident   all KV is on the GPU
    in step    pages that are not hot are fetched on a side stream, layer by layer, from the step's beginning on
    on demand  a layer's pages are fetched when its queries are there, as must be where nobody has announced them

The bound of a step is the resident step or the link's time for what was fetched at its bulk rate, whichever is longer.
Resident KV holds what the backing store holds. The logits of all rounds of a replay's last pass are compared bit by
bit.
"""

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.lab.benchmarks.announced_trace import ROWS
from specahead.lab.benchmarks.gpu_timing import graphics_processor, require_gpu
from specahead.lab.benchmarks.model_folders import read_shape_of
from specahead.lab.benchmarks.offload_kv import Check, compare_logits
from specahead.lab.benchmarks.offload_steps import (
    IN_STEP,
    ON_DEMAND,
    SETTLED,
    STORED_LAYERS,
    Case,
    Measured,
    Step,
    Store,
    link_rate,
    make_store,
    pack_rounds,
    replay,
    resident_kv,
    tiered_kv,
)
from specahead.lab.benchmarks.random_models import random_decoder
from specahead.lab.benchmarks.read_trace import ReadTrace, about_reads, load_reads
from specahead.lab.benchmarks.shapes import Shape
from specahead.lab.results import Columns, describe, describe_run, live_line, text_table, write_json

SHARES = {1 / 8: "1/8", 1 / 10: "1/10", 1 / 16: "1/16", 1 / 32: "1/32"}  # that are recorded, and their traces
SHORTEST = 16 * PAGE_SIZE
SPARE = 8 << 30  # bytes of the GPU's memory for all but weights and KV
RESIDENT = "resident"
QUERIES = 5  # of each session in a step


@dataclass(frozen=True)
class OffloadRow:
    """Steps of one case, measured in one way. A page is that of one layer and KV head."""

    batch: int
    context: int
    share: float
    way: str
    hot: float
    milliseconds: float
    """Mean over the settled rounds; p95 is of the same."""
    p95: float
    resident: float | None
    """Milliseconds of the resident step; None where its KV does not fit the GPU."""
    pages_read: float
    pages_fetched: float
    """Pages of a step that came over the link."""
    pages_refused: float
    """Listed pages without a slot. If there are any the step is void: services would verify fewer sessions at once."""
    bytes_fetched: float
    link_used: float
    """Bytes a second of fetches over the whole step, as a share of the host link's bulk rate."""
    bound: float
    """Milliseconds that the step takes at least (see the module)."""
    check: Check
    """The logits against those of the resident step."""

    @property
    def to_resident(self) -> float | None:
        return None if self.resident is None else self.milliseconds / self.resident


# What is selected.


@lru_cache
def _recorded() -> dict[str, ReadTrace]:
    return {trace.name: trace for trace in load_reads()}


def rounds_of(case: Case, share: float, device: torch.device) -> Tensor:
    """Return what the sessions of a case read, as words of bits: int64 [rounds, batch, rows, words]. Sessions differ in
    the arrangement of a trace."""
    if case.rows > ROWS:
        raise ValueError(f"{case.rows} KV heads in all layers; the recorded reads have {ROWS} rows")
    rows = (2 * np.arange(case.rows) + 1) * ROWS // (2 * case.rows)  # evenly spread
    trace, blocks = _recorded()[SHARES[share]], case.context // PAGE_SIZE
    sessions = [trace.shifted(number) for number in range(case.batch)]
    rounds = [[each.matrix(number, blocks)[rows] for each in sessions] for number in range(trace.rounds)]
    return pack_rounds(np.array(rounds), device)


# Measuring.


class Bench:
    """A decoder, and a backing store for the largest case."""

    def __init__(self, flags: argparse.Namespace, cases: list[Case], device: torch.device) -> None:
        self.flags, self.device = flags, device
        largest = max(cases, key=lambda case: case.pages)
        longest = max(case.context for case in cases) + QUERIES
        self.store: Store = make_store(largest, device)
        self.link = link_rate(self.store, device)
        self.decoder = random_decoder(largest.shape, longest, device.type, largest.dtype, flags.quantization)

    def rows(self, case: Case) -> Iterator[OffloadRow]:
        """Yield the rows of a case. The resident ones come first, and give their memory back before there are tiers."""
        rounds = {share: rounds_of(case, share, self.device) for share in self.flags.shares}
        resident: dict[float, float] = {}
        wanted: dict[float, list[Tensor | None]] = {}
        for share, measured in self._measure(case, rounds, None).items():
            row = self._row(case, share, RESIDENT, 1.0, measured, None, Check())
            resident[share], wanted[share] = row.milliseconds, measured.logits
            yield row
        for hot, way in itertools.product(self.flags.hot, (IN_STEP, ON_DEMAND)):
            for share, measured in self._measure(case, rounds, hot, way).items():
                check = compare_logits(measured.logits, wanted[share]) if share in wanted else Check()
                yield self._row(case, share, way, hot, measured, resident.get(share), check)

    def _measure(
        self, case: Case, rounds: dict[float, Tensor], hot: float | None, way: str = IN_STEP
    ) -> dict[float, Measured]:
        """Return what was measured for each share; nothing if the GPU has no room. hot: None means resident KV."""
        if not self._fits(case, 1.0 if hot is None else hot):
            where = "wholly on the GPU" if hot is None else f"{hot:.1%} of it on the GPU"
            print(f"skipped: KV of {case.batch} x {case.context}, {where}, does not fit its memory")
            return {}
        device = self.device
        kv = resident_kv(case, self.store, device) if hot is None else tiered_kv(case, hot, self.store, device)
        step = Step(self.decoder, kv, case, next(iter(rounds.values()))[0], way)
        measured = {share: replay(step, words, self.flags.passes) for share, words in rounds.items()}
        del step, kv
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return measured

    def _fits(self, case: Case, hot: float) -> bool:
        if self.device.type != "cuda":
            return True
        kv = case.layer_bytes * case.shape.num_hidden_layers * case.frames(hot) / case.pages
        return kv + SPARE <= torch.cuda.mem_get_info(self.device)[0]

    def _row(
        self, case: Case, share: float, way: str, hot: float, measured: Measured, resident: float | None, check: Check
    ) -> OffloadRow:
        mean, size = float(np.mean(measured.milliseconds)), measured.fetched * case.page_bytes
        if way == RESIDENT:
            resident = mean
        return OffloadRow(
            batch=case.batch,
            context=case.context,
            share=share,
            way=way,
            hot=hot,
            milliseconds=mean,
            p95=float(np.percentile(measured.milliseconds, 95)),
            resident=resident,
            pages_read=measured.read,
            pages_fetched=measured.fetched,
            pages_refused=measured.refused,
            bytes_fetched=size,
            link_used=1e3 * size / mean / self.link,
            bound=max(resident or 0.0, 1e3 * size / self.link),
            check=check,
        )


def choose_cases(flags: argparse.Namespace, shape: Shape, dtype: torch.dtype) -> list[Case]:
    """Return the cases whose backing store fits the host's memory, and print the others. Raises ValueError for none."""
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cases = []
    for context in flags.contexts:
        for batch in flags.batches:
            case = Case(shape, batch, context, QUERIES, dtype, flags.kv_cache_dtype)
            if case.store_bytes <= room:
                cases.append(case)
            else:
                print(
                    f"skipped: {batch} x {context}: its store takes {case.store_bytes / 2**30:.1f} GiB of "
                    f"the host's memory, of which {room / 2**30:.1f} are free"
                )
    if not cases:
        raise ValueError("the host has no room for the backing store of any case")
    return cases


def _check(flags: argparse.Namespace) -> None:
    if not all(0 < value <= 1 for value in flags.hot):
        raise ValueError(f"--hot must lie in (0, 1], got {flags.hot}")
    if not all(share in SHARES for share in flags.shares):
        raise ValueError(f"--shares must be among those recorded, {list(SHARES)}, got {flags.shares}")
    if any(context % PAGE_SIZE or context < SHORTEST for context in flags.contexts):
        raise ValueError(f"--contexts must be multiples of {PAGE_SIZE}, {SHORTEST} at least, got {flags.contexts}")
    if min(*flags.batches, flags.passes) < 1:
        raise ValueError("--batches and --passes must be 1 at least")


def run(flags: argparse.Namespace) -> None:
    """Measure, print the table, and write it to the JSON file if one is named.

    The shape `tiny` needs no CUDA device. Without one it is a rehearsal: all runs eagerly, and times say nothing.
    Raises ValueError where a GPU is needed and missing, and for flags that are not allowed.
    """
    if flags.shape != "tiny":
        require_gpu()
    _check(flags)
    shape = read_shape_of(flags.shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = choose_cases(flags, shape, dtype)
    stored = max(case.store_bytes for case in cases)
    print(f"page-locked host memory: {stored / 2**30:.2f} GiB", flush=True)
    with torch.inference_mode():
        bench = Bench(flags, cases, device)
        rows = []
        for case in tqdm(cases, desc="replaying"):
            for row in bench.rows(case):
                rows.append(row)
                tqdm.write(live_line(_COLUMNS, row), sys.stderr)  # what there is, should the rest not come
    machine = graphics_processor() if device.type == "cuda" else "no GPU: a rehearsal, times say nothing"
    head = describe_run(flags, machine) | {
        "link": f"{bench.link / 1e9:.1f} GB/s, bulk copies",
        "backing store": f"{stored / 1e9:.2f} GB page-locked: memory of {STORED_LAYERS} layers, which the others share",
        "traces": ", ".join(f"{key} {value}" for key, value in about_reads().items()),
    }
    print(f"{describe(head)}\n{text_table(_COLUMNS, rows, left=1)}\n{_LEGEND}")
    write_json(flags.json, head | {"link_bytes_a_second": bench.link, "rows": rows})


_COLUMNS: Columns[OffloadRow] = {
    "case       ": lambda row: f"{row.batch} x {row.context}",
    "read": lambda row: f"{row.share:.2%}",
    "hot": lambda row: f"{row.hot:.1%}",
    "way": lambda row: row.way,
    "step": lambda row: f"{row.milliseconds:.3f} ms",
    "p95": lambda row: f"{row.p95:.3f} ms",
    "to resident": lambda row: "" if row.to_resident is None else f"{row.to_resident:.3f}",
    "pages": lambda row: f"{row.pages_read:,.0f}",
    "missed": lambda row: f"{row.pages_fetched:,.0f} {row.pages_fetched / row.pages_read:>6.2%}",
    "no slot": lambda row: f"{row.pages_refused / row.pages_read:.2%}",
    "fetched": lambda row: f"{row.bytes_fetched / 1e6:.1f} MB",
    "of link": lambda row: f"{row.link_used:.1%}",
    "bound": lambda row: f"{row.bound:.3f} ms",
    "to bound": lambda row: f"{row.milliseconds / row.bound:.3f}" if row.bound else "",
    "same": lambda row: "" if row.way == RESIDENT else str(row.check),
}
_LEGEND = f"""\
Means over the rounds from the {SETTLED + 1}th on, nothing hot before the first; p95 of the same. Read: as asked of the
selection, to which come the first block, the window and the round's own. Hot: frames, of all pages. Pages, each of
a layer and KV head: read a step; missed: fetched over the link; no slot: neither hot nor fetched, and the step is void.
Bound: the resident step, or what was fetched at the link's bulk rate.
Same: whether all logits of so many rounds (of the last pass, without void ones) are those of the resident step, in
every bit; if not, the greatest difference; -: nothing to compare with."""
