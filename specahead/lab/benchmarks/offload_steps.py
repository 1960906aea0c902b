"""Replayed verification steps of `approximate` sessions, over KV that lies wholly on the GPU or in tiers.

Weights and KV are random; both kinds of KV hold the same. The replay imposes which blocks a step reads: the announced
words of its shared budget carry the selection, and there is no room for more. On a GPU a step is one CUDA graph;
without one it runs eagerly, as a rehearsal.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specahead.config.speculation import KVCacheDtype
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.host_memory import host_zeros
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from specahead.engine.model.decoder import Decoder
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.buffers import make_buffers
from specahead.engine.steps.inputs import ReadMemory, SequenceInput, SharedBudget, SparseRead
from specahead.engine.steps.launches import run_pass
from specahead.engine.steps.layout import lay_out_pass
from specahead.engine.steps.reads import PagedModel
from specahead.engine.steps.shapes import JudgeShape, PassShape, ReadShape
from specahead.kernels.backends import default_backend, power_of_two
from specahead.kernels.kv_scales import EIGHT_BITS, KVScales, as_bytes
from specahead.kernels.selection import WORD
from specahead.lab.benchmarks.gpu_timing import AWAKE, capture, copy_milliseconds
from specahead.lab.benchmarks.offload_kv import FilledTieredKV
from specahead.lab.benchmarks.random_models import GROUP, random_scales
from specahead.lab.benchmarks.shapes import Shape

IN_STEP, ON_DEMAND = "in step", "on demand"  # when pages are fetched
SINK, WINDOW, DECAY = 1, 4, 0.9  # blocks that are always read, and the share of weights kept from pass to pass
SETTLED = 5  # first rounds of a replay, which do not count: a session has to read most of what it needs
LINK_COPY = 1 << 30  # bytes of a bulk copy at most
STORED_LAYERS = 2  # with pinned memory of their own; the other layers share it

# Keys and values, a layer each, [pages, kv_heads, PAGE_SIZE, head_dim].
Store = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `context` tokens, a multiple of PAGE_SIZE, and `queries` that a step adds to each."""

    shape: Shape
    batch: int
    context: int
    queries: int
    dtype: torch.dtype
    kv_cache_dtype: KVCacheDtype = "auto"

    @property
    def held(self) -> torch.dtype:
        """The dtype of KV."""
        return EIGHT_BITS if self.kv_cache_dtype == "fp8" else self.dtype

    @property
    def rows(self) -> int:
        """KV heads of all layers."""
        return self.shape.num_hidden_layers * self.shape.num_key_value_heads

    @property
    def pages_each(self) -> int:
        return pages_for(self.context + self.queries)

    @property
    def pages(self) -> int:
        return self.batch * self.pages_each

    @property
    def page_bytes(self) -> int:
        """Keys and values of one KV head."""
        return 2 * PAGE_SIZE * self.shape.head_dim * self.held.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.pages * self.shape.num_key_value_heads * self.page_bytes

    @property
    def store_bytes(self) -> int:
        """What the backing store takes of the host's memory."""
        return self.layer_bytes * min(STORED_LAYERS, self.shape.num_hidden_layers)

    def frames(self, hot: float) -> int:
        """Return the frames for a share of all pages, and at least for the pages that a step writes."""
        written = self.pages_each - self.context // PAGE_SIZE
        return min(self.pages, max(self.batch * written, int(hot * self.pages)))


def make_store(case: Case, device: torch.device) -> Store:
    """Random pages on the host for a case and any smaller one; STORED_LAYERS tensors stand in turn for all layers.

    What the link carries is the same whichever memory it comes from, and the whole KV of a batch need not be pinned.
    """
    shape = case.pages, case.shape.num_key_value_heads, PAGE_SIZE, case.shape.head_dim

    def side() -> list[Tensor]:
        made = [host_zeros(shape, case.held, device) for _ in range(STORED_LAYERS)]
        for part in made:
            as_bytes(part).copy_(as_bytes(torch.randn(shape, dtype=case.dtype, device=device).to(case.held)))
        return [made[layer % STORED_LAYERS] for layer in range(case.shape.num_hidden_layers)]

    return side(), side()


def link_rate(store: Store, device: torch.device) -> float:
    """Return the bytes a second of bulk copies from the backing store to the device (or to memory)."""
    source = store[0][0].flatten()
    source = source[: LINK_COPY // source.element_size()]
    target = torch.empty_like(source, device=device)
    if device.type == "cuda":
        return 1e3 * source.nbytes / copy_milliseconds(source, target)
    began = time.perf_counter()
    target.copy_(source)
    return source.nbytes / (time.perf_counter() - began)


def resident_kv(case: Case, store: Store, device: torch.device) -> KVCache:
    """Return resident KV with the contents of the store. Both kinds of KV give out full pages sequence by sequence."""
    shape = case.shape
    of_model = shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim
    kv = KVCache(*of_model, case.pages, case.dtype, device, scales=_scales(case, device))
    full = case.context // PAGE_SIZE
    end = case.batch * full
    for parts, far in zip((kv.k_pages, kv.v_pages), store, strict=True):
        for part, layer in zip(parts, far, strict=True):
            as_bytes(part)[:end].copy_(as_bytes(layer)[:end].view(end, *part.shape[1:]))
    return kv


def _scales(case: Case, device: torch.device) -> KVScales | None:
    torch.manual_seed(0)  # both kinds of KV have the same
    return random_scales(case.shape, device) if case.kv_cache_dtype == "fp8" else None


def tiered_kv(case: Case, hot: float, store: Store, device: torch.device) -> FilledTieredKV:
    """Return KV in tiers. hot: share of all pages that the GPU has frames for."""
    shape = case.shape
    of_model = shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim
    stored = [(keys[: case.pages], values[: case.pages]) for keys, values in zip(*store, strict=True)]
    return FilledTieredKV(of_model, case.frames(hot), case.pages, case.dtype, device, stored, _scales(case, device))


def open_sequences(kv: KVCache, case: Case) -> list[SequenceKV]:
    """Return sequences before a pass: all full pages hold KV, in tiers on the host alone, and queries have room."""
    sequences = [SequenceKV() for _ in range(case.batch)]
    for sequence in sequences:
        kv.grow(sequence, case.context)
        sequence.length = case.context
        if isinstance(kv, FilledTieredKV):
            kv.adopt_stored(sequence)
    kv.begin_pass([(sequence, case.queries) for sequence in sequences])
    kv.keep_group_means(GROUP, max(1, case.batch * (case.context // GROUP)))
    count = case.context // GROUP
    for i, sequence in enumerate(sequences):
        sequence.groups = list(range(i * count, (i + 1) * count))
        _make_up_means(kv, sequence, i)
    return sequences


def _make_up_means(kv: KVCache, sequence: SequenceKV, seed: int) -> None:
    """Fill in random group means, the same for a sequence wherever its KV lies. They are not made from its pages."""
    assert kv.means is not None
    random = torch.Generator(kv.device).manual_seed(seed)
    for layer in range(kv.num_layers):
        shape = len(sequence.groups), *kv.means.k.shape[2:]
        for part in (kv.means.k, kv.means.v):
            part[layer, sequence.groups] = torch.randn(shape, generator=random, device=kv.device) * GROUP**-0.5
        kv.means.k_variance[layer, sequence.groups] = 1.0


def step_shape(case: Case, fetches: bool) -> PassShape:
    """Return the shape that ModelRunner has for verification with a shared budget."""
    sequences = power_of_two(case.batch)
    return PassShape(
        sequences=sequences,
        rows=sequences * case.queries,
        queries=case.queries,
        pages=case.pages_each,
        read=ReadShape(block_size=PAGE_SIZE, groups=case.context // GROUP, decay=DECAY, fetches=fetches),
        judge=JudgeShape(),
    )


@dataclass(frozen=True)
class Measured:
    """Of settled rounds: milliseconds of each; pages (of a layer and head) that one read, fetched, had no slot for.

    logits: of all rounds of the last pass, [batch, queries, vocab] on the host; None where a round was void.
    """

    milliseconds: list[float]
    read: float
    fetched: float
    refused: float
    logits: list[Tensor | None]


class Step:
    """One step over a KV, whose tokens are never committed, so that it can be run over and over."""

    def __init__(self, decoder: Decoder, kv: KVCache, case: Case, words: Tensor, way: str = IN_STEP) -> None:
        """words: int64 [batch, rows, words], what the step reads while it is captured; way: IN_STEP or ON_DEMAND, where
        KV lies in tiers"""
        self.kv, self.case, device = kv, case, kv.device
        shape = step_shape(case, kv.offloads)
        memory = torch.zeros(case.batch, case.rows, shape.blocks, device=device)
        self.buffers = make_buffers(shape, kv, memory)
        sequences = open_sequences(kv, case)
        inputs = [_input(case, *each) for each in zip(sequences, words.cpu().numpy(), strict=True)]
        tables = [sequence.table() for sequence in sequences] if shape.read.fetches else None
        lay_out_pass(self.buffers.inputs, shape, inputs, list(range(case.batch)), kv, tables)
        # Nothing is hot but what a step writes.
        self._tables = [table.clone() for table in kv.memory.tables] if isinstance(kv, FilledTieredKV) else []
        if isinstance(kv, FilledTieredKV):
            kv.on_demand = way == ON_DEMAND
        work = partial(run_pass, PagedModel(decoder, kv, default_backend(device)), shape, self.buffers)
        self.run: Callable[[], None] = capture(work).replay if device.type == "cuda" else work

    def choose(self, words: Tensor) -> None:
        """Have the next run read other words; KV in tiers begins another round with it."""
        given = self.buffers.tensors
        given["bitmaps"][: len(words), :, : words.shape[-1]].copy_(words)
        if "round" in given:
            given["round"].fill_(self.kv.next_round())

    def forget(self) -> None:
        """Go back to the tiers' first state: nothing is hot but what a step writes."""
        if isinstance(self.kv, FilledTieredKV):
            for table, first in zip(self.kv.memory.tables, self._tables, strict=True):
                table.copy_(first)

    def counts(self) -> Tensor:
        """Return how many pages the last run read, fetched, and had no slot for: [3]."""
        results = self.buffers.results.device
        nothing = torch.zeros_like(results["blocks_read"][:1])
        tiers = (results.get(name, nothing) for name in ("fetched", "overflow"))
        return torch.cat([results["blocks_read"].sum(dtype=torch.int32)[None], *tiers])

    def logits(self) -> Tensor:
        """Return a copy of the last run's logits: [batch, queries, vocab]."""
        logits = self.buffers.tensors["logits"]
        by_place = logits.view(-1, self.case.queries, logits.shape[-1])
        return by_place[: self.case.batch].clone()


def _input(case: Case, sequence: SequenceKV, words: np.ndarray) -> SequenceInput:
    last = case.context // PAGE_SIZE - WINDOW
    memory = ReadMemory(torch.ones(case.rows), DECAY)
    budget = SharedBudget(words.view(np.uint64), SINK, last, 0, memory, ())
    read = SparseRead(PAGE_SIZE, budget, group_means=True)
    tokens = list(range(1, case.queries + 1))
    drafted = Drafted(tokens[1:], [], Sampling(0.0), case.context)
    return SequenceInput(sequence, tokens, "all", read, drafted=drafted)


def pack_rounds(chosen: np.ndarray, device: torch.device) -> Tensor:
    """Pack what sessions read, bool [rounds, batch, rows, blocks], into words of int64, the lowest bit first."""
    padded = np.pad(chosen, [(0, 0)] * 3 + [(0, -chosen.shape[-1] % WORD)])
    return torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view("<i8")).to(device)


class _Mark:
    """A moment: of the device's stream, without a GPU of the host."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def milliseconds_to(self, later: "_Mark") -> float:
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event)
        return 1e3 * (later._time - self._time)


def replay(step: Step, rounds: Tensor, passes: int) -> Measured:
    """Run all rounds, `passes` times over, and return what the rounds from SETTLED on took, read and fetched.

    rounds: int64 [rounds, batch, rows, words]. Nothing is hot when a pass begins: else all that the pass before fetched
    would be.
    On a GPU all is launched without waiting, so that a step has been launched when the one before it ends; the last
    pass leaves copies of its logits between the steps.
    """
    device = rounds.device
    _wake(step, rounds[0])
    marks: list[tuple[_Mark, _Mark]] = []
    counted: list[Tensor] = []
    left: list[tuple[Tensor, Tensor]] = []
    for turn in range(passes):
        step.forget()
        for number, words in enumerate(rounds):
            step.choose(words)
            begin = _Mark(device)
            step.run()
            end = _Mark(device)
            counts = step.counts()
            if number >= SETTLED:
                marks.append((begin, end))
                counted.append(counts)
            if turn == passes - 1:
                left.append((counts, step.logits()))
    if device.type == "cuda":
        torch.cuda.synchronize()
    read, fetched, refused = torch.stack(counted).float().mean(0).tolist()
    logits = [None if counts[2] else given.cpu() for counts, given in left]
    times = [begin.milliseconds_to(end) for begin, end in marks]
    return Measured(times, read, fetched, refused, logits)


def _wake(step: Step, words: Tensor) -> None:
    """Run the step until the clocks of an idle GPU are up."""
    if words.device.type != "cuda":
        return
    step.choose(words)
    began = time.perf_counter()
    while time.perf_counter() < began + AWAKE:
        step.run()
        torch.cuda.synchronize()
