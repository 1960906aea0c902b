"""`specahead bench step`: whole steps of target and draft on a GPU, as the services run them: one CUDA graph each.

Weights are random, and so is the selection of the imposed share of KV, since only time is measured.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeVar

import torch

from specahead.config.speculation import KVCacheDtype
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.kv.tier_memory import Pages
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.model.decoder import Decoder
from specahead.engine.staging import Buffers
from specahead.engine.steps.announcing import Announcer
from specahead.engine.steps.buffers import make_buffers, make_round_buffers
from specahead.engine.steps.launches import run_pass
from specahead.engine.steps.read_memories import ReadMemories
from specahead.engine.steps.reads import PagedModel
from specahead.engine.steps.requests import RoundSettings
from specahead.engine.steps.round_launches import run_round
from specahead.engine.steps.shapes import Choosers, JudgeShape, PassShape, ReadShape, RoundShape
from specahead.kernels.backends import default_backend
from specahead.kernels.residency import drop_pages
from specahead.lab.benchmarks.gpu_timing import TimedRow, copy_bandwidth, graph_milliseconds, report, require_gpu
from specahead.lab.benchmarks.model_folders import read_shape_of
from specahead.lab.benchmarks.random_models import GROUP, random_decoder, random_scales
from specahead.lab.benchmarks.shapes import Shape

Cache = TypeVar("Cache", bound=KVCache)
BLENDED = 8  # heads of the draft that a row of an announcement is a sum of, as of a calibrated plan
_LEGEND = """\
rival: for sparse steps our dense step of the same run; for a shared choice of blocks a choice of each query; for blocks
that are fetched from host memory the same step with all KV on the GPU. Weights are random, and the selection is
imposed, unless the model chooses blocks by itself"""


class _SharedStoreKV(TieredKV):
    """KV in tiers whose layers share one backing store, to save memory: its contents do not matter for times."""

    def _make_store(self, layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Pages]:
        return super()._make_store(1, shape, dtype) * layers


class Bench:
    """A decoder with KV for the largest case. bandwidth: in bytes a second."""

    def __init__(
        self,
        shape: Shape,
        bandwidth: float,
        repeats: int,
        longest: int,
        device: str = "cuda",
        batch: int = 8,
        quantization: str = "none",
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        self.shape, self.bandwidth, self.repeats, self.device = shape, bandwidth, repeats, torch.device(device)
        self.decoder: Decoder = random_decoder(shape, longest + PAGE_SIZE, device, quantization=quantization)
        pages = batch * (longest // PAGE_SIZE)
        of_shape = shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim
        how: dict[str, Any] = {"page_means": self.decoder.block_rule is not None}
        how["scales"] = random_scales(shape, device) if kv_cache_dtype == "fp8" else None
        self.kv = _filled(KVCache(*of_shape, pages, torch.bfloat16, device, **how))
        self.model = PagedModel(self.decoder, self.kv, default_backend(self.device))

    def kv_bytes(self, batch: int, context: int, share: float = 1.0) -> float:
        """Return the bytes of a share of the KV."""
        shape, a_number = self.shape, self.kv.k_pages[0].itemsize
        numbers = 2 * batch * context * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers
        return numbers * a_number * share

    def floor(self, kv_bytes: float, rows: Sequence[int]) -> float:
        """Return the milliseconds in which passes of `rows` rows read weights and KV at the copy bandwidth."""
        read = self.decoder.weight_bytes * sum(map(self.decoder.read_share, rows))
        return 1e3 * (read + kv_bytes) / self.bandwidth

    def step(self, batch: int, context: int, queries: int) -> TimedRow:
        """Time a dense verification, or a draft step."""
        shape = PassShape(batch, batch * queries, queries, context // PAGE_SIZE)
        buffers = self._buffers(shape, context)
        read = self.kv_bytes(batch, context)
        return self._measure(f"{queries} queries, dense, {batch} x {context}", shape, buffers, read)

    def choosing(self, batch: int, context: int, queries: int, choosers: Choosers) -> TimedRow:
        """Time a verification of a target whose own attention chooses blocks. The floor has each choice read apart."""
        rule = self.decoder.block_rule
        assert rule is not None
        shape = PassShape(batch, batch * queries, queries, context // PAGE_SIZE, choosers=choosers)
        buffers = self._buffers(shape, context)
        buffers.tensors["token_ids"].random_(self.shape.vocab_size)
        choices = queries if choosers is Choosers.EACH else 1
        share = min(1.0, choices * rule.top * rule.block_size / context)
        read = self.kv_bytes(batch, context, share) + self.kv_bytes(batch, context) / (2 * PAGE_SIZE)
        what = "each choosing blocks" if choosers is Choosers.EACH else "the first choosing blocks for all"
        return self._measure(f"{queries} queries, {what}, {batch} x {context}", shape, buffers, read)

    def fetching(self, batch: int, context: int, queries: int, dropped: float, prefetches: bool = True) -> TimedRow:
        """Time a verification whose first token chooses for all, over tiers with GPU pages for half of the KV.

        dropped: the share of all pages that leaves the GPU between steps. prefetches: whether the step knows the last
            choices, which are the same as its own; else each layer fetches what it has chosen.
        """
        pages, of_kv = context // PAGE_SIZE, (self.kv.num_layers, self.kv.kv_heads, self.kv.k_pages[0].shape[3])
        sizes = batch * pages // 2, batch * pages, PAGE_SIZE
        kv = _filled(_SharedStoreKV(*of_kv, *sizes, self.kv.dtype, self.device, scales=self.kv.scales, page_means=True))
        shape = PassShape(batch, batch * queries, queries, pages, choosers=Choosers.FIRST, read=ReadShape(fetches=True))
        rule = self.decoder.block_rule
        assert rule is not None
        choices = ReadMemories(batch).choices(kv.num_layers, kv.kv_heads, rule.width(queries), self.device)
        buffers = self._buffers(shape, context, choices, kv)
        buffers.tensors["indices"].copy_(torch.arange(batch))
        given, leaving = buffers.tensors, torch.zeros(int(dropped * sizes[1]), dtype=torch.int32, device=self.device)

        def run() -> None:
            drop_pages(kv.memory.tables, leaving.random_(sizes[1]), kv.kv_heads, kv.memory.backend)
            given["round"] += 2
            if not prefetches:
                choices.fill_(-1)
            run_pass(PagedModel(self.decoder, kv, default_backend(self.device)), shape, buffers)

        ms = graph_milliseconds(run, self.repeats)
        fetched, listed = (int(buffers.results.device[name]) for name in ("fetched", "listed"))
        how = "prefetched" if prefetches else "fetched"
        choice = f"the first choosing blocks for all, {fetched / listed:.0%} {how}"
        floor = self.floor(listed * self.kv_bytes(1, PAGE_SIZE) / of_kv[0] / of_kv[1], [shape.rows])
        return TimedRow(f"{queries} queries, {choice}, {batch} x {context}", ms, floor)

    def served(self, batch: int, context: int, queries: int, share: float) -> TimedRow:
        """Time a verification of `approximate` sessions: the step shares `share` of all blocks out over layers and
        heads, reads means for the others, remembers weights, and gives greedy verdicts."""
        what = f"{queries} queries, {share:.0%} shared out, means, verdicts, {batch} x {context}"
        return self._shared_out(what, batch, context, queries, share, self.kv_bytes(batch, context, share))

    def drafting(self, batch: int, context: int, gamma: int, share: float) -> TimedRow:
        """Time a whole round of a target that drafts for itself: gamma passes over `share` of all blocks, then a dense
        pass over gamma + 1 tokens that weighs all blocks and gives greedy verdicts."""
        what = f"{gamma} drafting passes of {share:.0%}, {gamma + 1} queries dense, weighed, {batch} x {context}"
        read = self.kv_bytes(batch, context) + gamma * self.kv_bytes(batch, context, share)
        return self._shared_out(what, batch, context, gamma + 1, share, read, drafts=True)

    def _shared_out(
        self, what: str, batch: int, context: int, queries: int, share: float, read: float, drafts: bool = False
    ) -> TimedRow:
        pages, rows = context // PAGE_SIZE, self.shape.num_hidden_layers * self.shape.num_key_value_heads
        read_shape = ReadShape(PAGE_SIZE, groups=context // GROUP, decay=0.9, weighs=drafts)
        shape = PassShape(
            batch,
            batch * queries,
            queries,
            pages,
            drafts=queries - 1 if drafts else 0,
            read=read_shape,
            judge=JudgeShape(),
        )
        if self.kv.means is None:
            self.kv.keep_group_means(GROUP)
        memory = torch.rand(batch, rows, pages, device=self.device)
        buffers = self._buffers(shape, context, memory)
        given = buffers.tensors
        given["indices"].copy_(torch.arange(batch))
        given["group_tables"].copy_(torch.arange(given["group_tables"].numel()).view(batch, -1))
        given["logits_rows"].copy_(torch.arange(batch * queries))
        room = int(share * rows * pages) - 5 * rows
        numbers = {"importance": 1, "first": 1, "last": pages - 4, "blocks": pages, "room": room}
        for name, value in (numbers | {"group_counts": read_shape.groups, "draft_counts": queries - 1}).items():
            given[name].fill_(value)
        return self._measure(what, shape, buffers, read, queries if drafts else 1)

    def _buffers(
        self, shape: PassShape, context: int, memory: torch.Tensor | None = None, kv: KVCache | None = None
    ) -> Buffers:
        """Lay out sequences of `context` tokens, with pages in random order. kv: KV in tiers; None: `self.kv`."""
        batch, queries, pages = shape.sequences, shape.queries, shape.pages
        buffers = make_buffers(shape, kv or self.kv, memory)
        given = buffers.tensors
        given["lengths"].fill_(context)
        given["query_starts"].copy_(torch.arange(batch + 1) * queries)
        tables = torch.randperm(batch * pages).view(batch, pages)
        given["block_tables"].copy_(tables)
        positions = torch.arange(context - queries, context).expand(batch, -1)
        given["positions"].copy_(positions.flatten())
        slots = tables.gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE
        given["slots"].copy_(slots.flatten())
        if kv is not None:
            given["page_numbers"].copy_(slots.flatten() // PAGE_SIZE)
            given["page_number_tables"].copy_(tables)
            given["slots"] %= len(kv.k_pages[0]) * PAGE_SIZE
            given["token_ids"].random_(self.shape.vocab_size)
        return buffers

    def _measure(self, what: str, shape: PassShape, buffers: Buffers, kv_bytes: float, passes: int = 1) -> TimedRow:
        ms = graph_milliseconds(lambda: run_pass(self.model, shape, buffers), self.repeats)
        rows = [*[shape.sequences] * (passes - 1), shape.rows]
        return TimedRow(what, ms, self.floor(kv_bytes, rows))

    def round(self, batch: int, context: int, gamma: int, share: float, announces: bool, branches: int = 1) -> TimedRow:
        """A draft's round: gamma tokens and the pass that runs the last one, the first pass dense and emitting."""
        rows = 256
        heads = self.shape.num_hidden_layers * self.shape.num_attention_heads
        blends = torch.randint(heads, (rows, BLENDED), dtype=torch.int32), torch.rand(rows, BLENDED)
        announcer = Announcer(*blends, stickiness=1.3).to(self.device)
        settings = RoundSettings(
            gamma, 64, PAGE_SIZE, share, 1, 4, announcer, branches=branches, alternatives=4 * (branches > 1)
        )
        pages = context // PAGE_SIZE
        shape = RoundShape(batch, 1, pages, False, announces, gamma, branches)
        buffers = make_round_buffers(shape, settings, self.shape.vocab_size, self.device)
        given, base = buffers.tensors, context - branches * (gamma + 1)
        given["lengths"].fill_(base)
        if branches > 1:
            own = base - 1 + torch.arange(branches, dtype=torch.int32) * (gamma + 1)
            given["own"].copy_(own.repeat(batch))
            for name, value in {"before": base - 1, "kept_own": 1, "totals": context - 1, "target": -1}.items():
                given[name].fill_(value)
        given["positions"].fill_(base - 1)
        given["query_starts"].copy_(torch.arange(batch + 1))
        tables = torch.randperm(batch * pages).view(batch, pages)
        given["block_tables"].copy_(tables)
        slots = tables[:, (base - 1) // PAGE_SIZE] * PAGE_SIZE + (base - 1) % PAGE_SIZE
        given["slots"].copy_(slots.repeat_interleave(branches))
        if announces:
            given["limits"].copy_(torch.tensor([[1], [pages - 8], [int(0.09 * rows * pages)]]).expand(-1, batch))
        ms = graph_milliseconds(lambda: run_round(self.model, settings, shape, buffers), self.repeats)
        read = self.kv_bytes(batch, context) + gamma * self.kv_bytes(batch, context, share)
        what = "and announces" if announces else "announces nothing"
        what += f", {branches} branches" if branches > 1 else ""
        name = f"round of {gamma} + 1 passes, later ones read {share:.0%}, {what}, {batch} x {context}"
        return TimedRow(name, ms, self.floor(read, [batch * branches] * (gamma + 1)))


def _filled(kv: Cache) -> Cache:
    """Fill KV with random numbers, and return it. Equal numbers would make selections follow the order of blocks."""
    for part in (*kv.k_pages, *kv.v_pages, *(kv.page_means or ())):
        part.copy_(torch.randn_like(part, dtype=torch.bfloat16))
    return kv


def target_rows(bench: Bench, batch: int, context: int) -> list[TimedRow]:
    """Measure the steps of a target; the sparse one is set against the dense one."""
    dense = bench.step(batch, context, 5)
    sparse = bench.served(batch, context, 5, 0.1).against(dense.milliseconds)
    rows = [bench.step(batch, context, 1), dense, sparse]
    rows += [bench.step(batch, context, 9), bench.drafting(batch, context, 8, 0.06)]
    return [row.named("target: ") for row in rows]


def choosing_rows(bench: Bench, batch: int, context: int) -> list[TimedRow]:
    """Measure the steps of a target that chooses blocks; sharing a choice is set against a choice of each query."""
    each = bench.choosing(batch, context, 4, Choosers.EACH)
    shared = bench.choosing(batch, context, 4, Choosers.FIRST).against(each.milliseconds)
    rows = [bench.choosing(batch, context, 1, Choosers.FIRST), bench.step(batch, context, 4), each, shared]
    for dropped, prefetches in ((0.0, True), (0.2, True), (0.2, False)):
        rows.append(bench.fetching(batch, context, 4, dropped, prefetches).against(shared.milliseconds))
    return [row.named("target: ") for row in rows]


def draft_rows(bench: Bench, batch: int, context: int) -> list[TimedRow]:
    """Measure the passes and rounds of a draft."""
    rows = [
        bench.step(batch, context, 1),
        bench.round(batch, context, 3, 0.1, False),
        bench.round(batch, context, 4, 0.1, False),
        bench.round(batch, context, 4, 0.1, True),
        bench.round(batch, context, 4, 1.0, True),
        bench.round(batch, context, 4, 0.1, True, branches=8),
    ]
    return [row.named("draft: ") for row in rows]


def run(flags: argparse.Namespace) -> None:
    """Measure, print the table, and write it to the JSON file if one is named. Raises ValueError without a GPU."""
    require_gpu()
    bandwidth, longest = copy_bandwidth(), max(flags.contexts)
    cases = list(product(flags.batches, flags.contexts))
    table: list[TimedRow] = []
    sides: list[tuple[str, dict[str, Any], Callable[[Bench, int, int], list[TimedRow]]]] = [
        (flags.target_shape, {"quantization": flags.quantization, "kv_cache_dtype": flags.kv_cache_dtype}, target_rows),
        (flags.draft_shape, {}, draft_rows),
    ]
    with torch.inference_mode():
        for name, how, measure in sides:
            if name == "none":
                continue
            shape = read_shape_of(name)
            bench = Bench(shape, bandwidth, flags.repeats, longest, batch=max(flags.batches), **how)
            for batch, context in cases:
                table += (choosing_rows if shape.sparse_config else measure)(bench, batch, context)
            del bench
            torch.cuda.empty_cache()
    report(flags, bandwidth, table, _LEGEND)
