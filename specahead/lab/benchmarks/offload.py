"""`specahead bench offload`: verification steps over KV in tiers against the same steps over KV wholly on the GPU.

What the target of the real services read (lab/benchmarks/read_trace.py) is read round after round. Three ways:

    resident   all KV is on the GPU
    in step    pages that are not hot are fetched on a side stream, layer by layer, from the step's beginning on
    on demand  a layer's pages are fetched when its queries are there, as must be where nobody has announced them

The bound of a step is the resident step or the link's time for what was fetched at its bulk rate, whichever is longer.
Resident KV holds what the home holds, and the logits of all rounds of a replay's last pass are compared bit by bit.

With a KV memory instead of shares of hot pages, as many sessions as fit it without tiers run resident, and a multiple
of them in tiers, the GPU's part of which lies in the same memory. Where the resident KV of all of these does not fit
the GPU, their logits are compared with those of resident parts: by steps of as many places, whose attention does not
depend on the batch, since others would round otherwise on a GPU.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.lab.benchmarks.gpu_timing import require_gpu
from specahead.lab.benchmarks.offload_check import Check, compare_logits
from specahead.lab.benchmarks.offload_sessions import hot_share, sessions_that_fit
from specahead.lab.benchmarks.offload_steps import (
    IN_STEP,
    ON_DEMAND,
    Case,
    Home,
    Measured,
    Step,
    link_rate,
    make_home,
    pack_rounds,
    replay,
    resident_kv,
    step_shape,
    tiered_kv,
)
from specahead.lab.benchmarks.read_trace import ReadTrace, about_reads, load_reads
from specahead.lab.benchmarks.residency import SETTLED
from specahead.lab.benchmarks.selection_trace import ROWS
from specahead.lab.benchmarks.shapes import Shape, random_decoder, read_shape_of
from specahead.lab.evaluation.plots import make_figure, save_figure

SHARES = {1 / 8: "1/8", 1 / 10: "1/10", 1 / 16: "1/16", 1 / 32: "1/32"}  # that are recorded, and their traces
SHORTEST = 16 * PAGE_SIZE
SPARE = 8 << 30  # bytes of the GPU's memory for all but weights and KV
RESIDENT = "resident"


@dataclass(frozen=True)
class OffloadSettings:
    """shares: of the pages, selected. hot: shares of the pages that there are frames for. passes: over all rounds.

    home_layers: layers that have a home of their own; the others share these. host_memory: bytes that homes may take;
    None: what is free. kv_memory: bytes of the GPU for KV; sessions_factor: times as many sessions run in tiers as fit
    these without; they take the place of batches and hot.
    """

    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (10240, 32768, 102400)
    shares: tuple[float, ...] = (1 / 10,)
    hot: tuple[float, ...] = (0.125, 0.25, 0.5)
    queries: int = 5
    passes: int = 4
    home_layers: int = 1
    host_memory: int | None = None
    kv_memory: int | None = None
    sessions_factor: int = 4

    def __post_init__(self) -> None:
        if not self.hot or not all(0 < value <= 1 for value in self.hot):
            raise ValueError(f"hot must lie in (0, 1], got {list(self.hot)}")
        if not self.shares or not all(share in SHARES for share in self.shares):
            raise ValueError(f"shares must be among those recorded, {list(SHARES)}, got {list(self.shares)}")
        if any(context % PAGE_SIZE or context < SHORTEST for context in self.contexts):
            raise ValueError(
                f"contexts must be multiples of {PAGE_SIZE}, {SHORTEST} at least, got {list(self.contexts)}"
            )
        if self.queries < 2 or min(*self.batches, self.passes, self.home_layers) < 1:
            raise ValueError("there must be 2 queries at least, and one of batches, passes and home layers")
        if self.sessions_factor < 1 or (self.kv_memory is not None and self.kv_memory < 1):
            raise ValueError(
                f"KV memory and sessions factor must be positive, got {self.kv_memory} B, {self.sessions_factor}"
            )


@dataclass(frozen=True)
class OffloadRow:
    """A step's mean and p95. resident: mean of the resident step, None where that does not fit the GPU.

    pages, each of a layer and KV head: read, fetched over the link (in tiers), and listed without finding a slot; where
    there are any of these the step is void, and the services would verify fewer sessions at once.
    link: bytes a second of fetches over the whole step; link_used: the same, of the host link's bulk rate. bound:
    milliseconds. check: against the resident step's logits; in_parts: those of resident parts.
    """

    batch: int
    context: int
    share: float
    way: str
    hot: float
    milliseconds: float
    p95: float
    resident: float | None
    pages_read: float
    pages_fetched: float
    pages_refused: float
    bytes_fetched: float
    link: float
    link_used: float
    bound: float
    check: Check
    in_parts: bool

    @property
    def to_resident(self) -> float | None:
        return None if self.resident is None else self.milliseconds / self.resident


# What is selected.


@lru_cache
def _recorded() -> dict[str, ReadTrace]:
    return {trace.name: trace for trace in load_reads()}


def selections(context: int, share: float, session: int) -> list[np.ndarray]:
    """Of each round bool [ROWS, blocks of the context]: what a session reads; each has an arrangement of its own."""
    trace = _recorded()[SHARES[share]].shifted(session)
    return [trace.matrix(number, context // PAGE_SIZE) for number in range(trace.rounds)]


def rounds_of(case: Case, share: float, device: torch.device) -> Tensor:
    """int64 [rounds, batch, rows, words]"""
    if case.rows > ROWS:
        raise ValueError(f"{case.rows} KV heads in all layers; the recorded reads have {ROWS} rows")
    rows = (2 * np.arange(case.rows) + 1) * ROWS // (2 * case.rows)  # evenly spread
    numbers = range(case.first, case.first + case.batch)
    sessions = [selections(case.context, share, number) for number in numbers]
    rounds = [[chosen[rows] for chosen in each] for each in zip(*sessions, strict=True)]
    return pack_rounds(rounds, device)


# Measuring.


class Bench:
    """A decoder, and homes for the largest case."""

    def __init__(self, settings: OffloadSettings, cases: list[Case], device: torch.device) -> None:
        self.settings, self.device = settings, device
        largest = max(cases, key=lambda case: case.pages)
        longest = max(case.context for case in cases) + settings.queries
        layers = min(settings.home_layers, largest.shape.num_hidden_layers)
        self.home: Home = make_home(largest, layers, device)
        self.link = link_rate(self.home, device)
        self.decoder = random_decoder(largest.shape, longest, device.type, largest.dtype)

    def rows(self, case: Case) -> Iterator[OffloadRow]:
        """Resident first: what it takes of the GPU is given back before there are tiers."""
        return self._rows(case, self.settings.hot)

    def rows_of_sessions(self, case: Case) -> Iterator[OffloadRow]:
        """Of the case's sessions in the KV memory that its part without tiers fits, after those of the part."""
        assert self.settings.kv_memory is not None
        part = case.batch // self.settings.sessions_factor
        if part < case.batch:
            yield from self._rows(replace(case, batch=part), ())
        yield from self._rows(case, (hot_share(self.settings.kv_memory, case),), part)

    def _rows(self, case: Case, hot: tuple[float, ...], part: int = 0) -> Iterator[OffloadRow]:
        """part: sessions that the GPU has room for as a whole, to compare with where it has none for all."""
        rounds = {share: rounds_of(case, share, self.device) for share in self.settings.shares}
        resident: dict[float, float] = {}
        wanted: dict[float, list[Tensor | None]] = {}
        for share, measured in self._measure(case, rounds, None).items():
            row = self._row(case, share, RESIDENT, 1.0, measured, None, Check(), False)
            resident[share], wanted[share] = row.milliseconds, measured.logits
            yield row
        pinned = replace(case, pinned=True)
        in_parts = part > 0 and not resident
        if in_parts:
            wanted = self._logits_of_parts(pinned, rounds, part)
        for share_hot in hot:
            for way in (IN_STEP, ON_DEMAND):
                tiered = share_hot, way
                found = self._measure(case, rounds, *tiered)
                checked = self._measure(pinned, rounds, *tiered, passes=1) if in_parts else found
                for share, measured in found.items():
                    check = Check()
                    if share in wanted:
                        check = compare_logits(checked[share].logits, wanted[share])
                    yield self._row(case, share, way, share_hot, measured, resident.get(share), check, in_parts)

    def _logits_of_parts(self, case: Case, rounds: dict[float, Tensor], part: int) -> dict[float, list[Tensor | None]]:
        """Of each share and round [batch, queries, vocab], from resident steps of so many sessions each."""
        places = step_shape(case, False).sequences
        parts: dict[float, list[list[Tensor | None]]] = {}
        for first in range(0, case.batch, part):
            here = replace(case, batch=part, first=case.first + first, places=places)
            words = {share: given[:, first : first + part] for share, given in rounds.items()}
            for share, measured in self._measure(here, words, None, passes=1).items():
                parts.setdefault(share, []).append(measured.logits)
        return {share: [_together(each) for each in zip(*found, strict=True)] for share, found in parts.items()}

    def _measure(
        self, case: Case, rounds: dict[float, Tensor], hot: float | None, way: str = IN_STEP, passes: int | None = None
    ) -> dict[float, Measured]:
        """By share. hot: None: resident. Nothing if the GPU has no room."""
        if not self._fits(case, 1.0 if hot is None else hot):
            where = "wholly on the GPU" if hot is None else f"{hot:.1%} of it on the GPU"
            print(f"skipped: KV of {case.batch} x {case.context}, {where}, does not fit its memory")
            return {}
        device = self.device
        kv = resident_kv(case, self.home, device) if hot is None else tiered_kv(case, hot, self.home, device)
        step = Step(self.decoder, kv, case, next(iter(rounds.values()))[0], way)
        passes = passes or self.settings.passes
        measured = {share: replay(step, words, passes) for share, words in rounds.items()}
        del step, kv
        _give_memory_back(device)
        return measured

    def _fits(self, case: Case, hot: float) -> bool:
        if self.device.type != "cuda":
            return True
        kv = case.layer_bytes * case.shape.num_hidden_layers * case.frames(hot) / case.pages
        return kv + SPARE <= torch.cuda.mem_get_info(self.device)[0]

    def _row(
        self,
        case: Case,
        share: float,
        way: str,
        hot: float,
        measured: Measured,
        resident: float | None,
        check: Check,
        in_parts: bool,
    ) -> OffloadRow:
        mean, size = float(np.mean(measured.milliseconds)), measured.fetched * case.page_bytes
        if way == RESIDENT:
            resident = mean
        rate = 1e3 * size / mean
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
            link=rate,
            link_used=rate / self.link,
            bound=max(resident or 0.0, 1e3 * size / self.link),
            check=check,
            in_parts=in_parts,
        )


def _together(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """Of one round. Resident rounds are never void."""
    return torch.cat([part for part in parts if part is not None])


def _give_memory_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def home_bytes(case: Case, settings: OffloadSettings) -> int:
    return case.layer_bytes * min(settings.home_layers, case.shape.num_hidden_layers)


def choose_cases(settings: OffloadSettings, shape: Shape, dtype: torch.dtype) -> list[Case]:
    """Those whose home the host has room for; says what is left out. Raises ValueError if that is all."""
    room = settings.host_memory
    if room is None:
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cases = []
    for context in settings.contexts:
        for batch in _batches(settings, Case(shape, 1, context, settings.queries, dtype)):
            case = Case(shape, batch, context, settings.queries, dtype)
            needed = home_bytes(case, settings)
            if needed <= room:
                cases.append(case)
            else:
                print(
                    f"skipped: {batch} x {context}: its home takes {needed / 2**30:.1f} GiB of the host's memory, "
                    f"of which there are {room / 2**30:.1f} (--host-memory, --home-layers)"
                )
    if not cases:
        raise ValueError("the host has no room for the home of any case")
    return cases


def _batches(settings: OffloadSettings, one: Case) -> tuple[int, ...]:
    """one: a single session. Raises ValueError if the KV memory does not hold it, or has no room for frames."""
    if settings.kv_memory is None:
        return settings.batches
    fit = sessions_that_fit(settings.kv_memory, one)
    if not fit:
        needed = one.pages * one.rows * one.page_bytes
        raise ValueError(
            f"the KV of one session of {one.context} tokens takes {needed / 2**30:.4g} GiB, --kv-memory has "
            f"{settings.kv_memory / 2**30:.4g}: raise it, or lower --contexts"
        )
    batch = fit * settings.sessions_factor
    hot_share(settings.kv_memory, replace(one, batch=batch))  # before anything is measured
    return (batch,)


def _settings_of(flags: argparse.Namespace) -> OffloadSettings:
    """Raises ValueError for flags that do not go together."""
    if flags.kv_memory is not None and (flags.batches or flags.hot):
        raise ValueError("--kv-memory says how many sessions and frames there are: leave --batches and --hot out")
    if flags.kv_memory is None and flags.sessions_factor is not None:
        raise ValueError("--sessions-factor is of the sessions that fit --kv-memory: give it")
    given: dict[str, Any] = {
        field.name: getattr(flags, field.name)
        for field in fields(OffloadSettings)
        if getattr(flags, field.name) is not None
    }
    for name, value in given.items():
        if name in ("host_memory", "kv_memory"):
            given[name] = int(value * 2**30)
        elif isinstance(value, list):
            given[name] = tuple(value)
    return OffloadSettings(**given)


def run(flags: argparse.Namespace) -> None:
    """Measure, print the table, write it to the JSON file and plot it if these are named.

    The shape `tiny` needs no CUDA device. Without one it is a rehearsal: all runs eagerly, and times say nothing.
    Raises ValueError where a GPU is needed and missing, and for settings that are not allowed.
    """
    if flags.shape != "tiny":
        require_gpu()
    settings, shape = _settings_of(flags), read_shape_of(flags.shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = choose_cases(settings, shape, dtype)
    homes = max(home_bytes(case, settings) for case in cases)
    print(f"page-locked host memory: {homes / 2**30:.2f} GiB", flush=True)
    with torch.inference_mode():
        bench = Bench(settings, cases, device)
        replayed = bench.rows if settings.kv_memory is None else bench.rows_of_sessions
        rows = []
        for case in tqdm(cases, desc="replaying"):
            for row in replayed(case):
                rows.append(row)
                tqdm.write(_line(row), sys.stderr)  # what there is, should the rest not come
    head = _head(flags.shape, settings, device, bench.link, homes)
    if settings.kv_memory is not None:
        head["sessions"] = "; ".join(_about_sessions(settings, case) for case in cases)
    print(report(head, rows))
    if flags.json:
        content = head | {"rows": [asdict(row) for row in rows]}
        Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")
    if flags.plot:
        print(plot_rows(rows, Path(flags.plot)))


# The table.


def _head(
    name: str, settings: OffloadSettings, device: torch.device, link: float, homes: int
) -> dict[str, str | float]:
    machine = "no GPU: a rehearsal, times say nothing"
    if device.type == "cuda":
        import triton

        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    head: dict[str, str | float] = {
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_of(name, settings),
        "link": f"{link / 1e9:.1f} GB/s, bulk copies",
        "link_bytes_a_second": link,
        "home": f"{homes / 1e9:.2f} GB page-locked; own homes: {settings.home_layers} layers, the others share them",
        "traces": ", ".join(f"{key} {value}" for key, value in about_reads().items()),
    }
    return head


def _about_sessions(settings: OffloadSettings, case: Case) -> str:
    assert settings.kv_memory is not None
    part = case.batch // settings.sessions_factor
    return (
        f"{settings.kv_memory / 2**30:.4g} GiB hold the KV of {part} of {case.context} tokens without tiers; "
        f"{case.batch} run in tiers"
    )


def command_of(name: str, settings: OffloadSettings) -> str:
    lists: dict[str, tuple[float, ...]] = {"contexts": settings.contexts, "shares": settings.shares}
    if settings.kv_memory is None:
        lists |= {"batches": settings.batches, "hot": settings.hot}
    else:
        lists |= {"kv-memory": (round(settings.kv_memory / 2**30, 6),), "sessions-factor": (settings.sessions_factor,)}
    words = [f"--{flag} {' '.join(map(str, values))}" for flag, values in lists.items()]
    numbers = f"--queries {settings.queries} --passes {settings.passes} --home-layers {settings.home_layers}"
    return f"specahead bench offload --shape {name} {' '.join(words)} {numbers}"


def report(head: dict[str, str | float], rows: list[OffloadRow]) -> str:
    lines = [f"{name}: {value}" for name, value in head.items() if isinstance(value, str)]
    lines.append(
        f"{'':<12} {'read':>7} {'hot':>6} {'way':<9} {'step':>10} {'p95':>10} {'to resident':>11} {'pages':>8} "
        f"{'missed':>14} {'no slot':>7} {'fetched':>9} {'GB/s':>5} {'of link':>7} {'bound':>10} {'to bound':>8} "
        f"same"
    )
    lines += [_line(row) for row in rows]
    lines.append(
        f"Means over the rounds from the {SETTLED + 1}th on, nothing hot before the first; p95 of the same. Read: as "
        "asked of the\nselection, to which come the first block, the window and the round's own. Hot: frames, of all "
        "pages. Pages, each of\na layer and KV head: read a step; missed: fetched over the link; no slot: neither hot "
        "nor fetched, and the step is void.\nGB/s: fetched over the whole step. Bound: the resident step, or what was "
        "fetched at the link's bulk rate.\nSame: whether all logits of so many rounds (of the last pass, without void "
        "ones) are those of the resident step, in\nevery bit; if not, the greatest difference; -: nothing to compare "
        "with. In parts: the resident KV of all sessions does\nnot fit; compared are steps in which nothing depends on "
        "the batch, of all in tiers and of resident parts."
    )
    return "\n".join(lines)


def _line(row: OffloadRow) -> str:
    ratio = "" if row.to_resident is None else f"{row.to_resident:.3f}"
    excess = f"{row.milliseconds / row.bound:.3f}" if row.bound else ""
    missed = f"{row.pages_fetched:,.0f} {row.pages_fetched / row.pages_read:>6.2%}"
    return (
        f"{f'{row.batch} x {row.context}':<12} {row.share:>7.2%} {row.hot:>6.1%} {row.way:<9} "
        f"{row.milliseconds:>7.3f} ms {row.p95:>7.3f} ms {ratio:>11} {row.pages_read:>8,.0f} {missed:>14} "
        f"{row.pages_refused / row.pages_read:>7.2%} {row.bytes_fetched / 1e6:>6.1f} MB {row.link / 1e9:>5.1f} "
        f"{row.link_used:>7.1%} {row.bound:>7.3f} ms {excess:>8} {_same(row)}"
    )


def _same(row: OffloadRow) -> str:
    if row.way == RESIDENT or row.check.same is None:
        return "" if row.way == RESIDENT else "-"
    return f"{row.check} ({row.check.rounds} rounds{', in parts' if row.in_parts else ''})"


def plot_rows(rows: list[OffloadRow], path: Path) -> Path:
    """Steps over tiers, as multiples of the resident step, against the size of the hot buffer; a batch a panel."""
    batches = sorted({row.batch for row in rows})
    figure, axes = make_figure(len(batches))
    colors: dict[tuple[int, float], Any] = {}
    for axis, batch in zip(axes, batches, strict=True):
        for (context, share, way), line in _lines(rows, batch).items():
            color = colors.setdefault((context, share), f"C{len(colors) % 10}")
            hot = [100 * row.hot for row in line]
            label = f"{context:,} tokens, {share:.1%} read, "
            style = "o-" if way == IN_STEP else "s--"
            axis.plot(hot, [row.to_resident for row in line], style, ms=3, color=color, label=label + way)
            if way == IN_STEP:
                bounds = [row.bound / row.resident for row in line if row.resident]
                axis.plot(hot, bounds, ":", color=color, label=label + "bound")
        axis.axhline(1.0, color="gray", lw=0.8)
        axis.set(xlabel="hot buffer, % of the KV", ylabel="step, of the resident step", title=f"batch {batch}")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    return save_figure(figure, path)


def _lines(rows: list[OffloadRow], batch: int) -> dict[tuple[int, float, str], list[OffloadRow]]:
    lines: dict[tuple[int, float, str], list[OffloadRow]] = {}
    for row in sorted(rows, key=lambda row: row.hot):
        if row.batch == batch and row.way != RESIDENT and row.resident is not None:
            lines.setdefault((row.context, row.share, row.way), []).append(row)
    return lines
