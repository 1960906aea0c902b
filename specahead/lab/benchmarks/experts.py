"""`specahead bench experts`: what a layer's mixture of experts takes on a GPU, and its products by how they are cut.

Rows and weights are random, so that a router chooses all experts about alike. A floor is the time in which the weights
of the chosen experts are read once.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from specahead.kernels.compiling import compile_ahead, end_compiling
from specahead.kernels.linear import GroupedWeight, LinearWeight, linear
from specahead.kernels.linear.few_rows import Tuning
from specahead.kernels.mixture import Experts, mix_experts
from specahead.kernels.mixture.products import default_cut, multiply_down, multiply_gated
from specahead.kernels.mixture.routing import Choice, Tiles, choose_experts, plan_tiles, tile_rows
from specahead.lab.benchmarks.gpu_timing import TimedRow, copy_bandwidth, graph_milliseconds, report, require_gpu
from specahead.lab.benchmarks.model_folders import read_shape_of
from specahead.lab.benchmarks.random_models import random_experts

COLUMNS, DEPTHS, STAGES = (64, 128), (64, 128, 256), (2, 3, 4, 5)
TIMES = 8  # in one graph, whose own launch takes as long as a small kernel
STAGED = range(48 << 10, 200 << 10)  # bytes of all stages of a program that are worth trying


@dataclass(frozen=True)
class Case:
    """Some rows, and the experts of a layer. Each method launches one part of mixing them."""

    x: Tensor
    experts: Experts

    @property
    def count(self) -> int:
        return len(self.experts.router)

    def route(self) -> tuple[Choice, Tiles]:
        logits = linear(self.x, LinearWeight(self.experts.router), "triton", in_parts=True)
        choice = choose_experts(logits, self.experts.chosen, self.experts.renormed, "triton")
        return choice, plan_tiles(choice, self.count, tile_rows(choice.ids.numel(), self.count), "triton")

    def multiply_gated(self, tiles: Tiles, cut: Tuning | None = None) -> Tensor:
        return multiply_gated(self.x, self.experts.gate_up, self.count, tiles, self.experts.chosen, cut)

    def multiply_down(self, inner: Tensor, tiles: Tiles, choice: Choice, cut: Tuning | None = None) -> Tensor:
        return multiply_down(inner, self.experts.down, self.count, tiles, choice.weights, cut)

    def mix(self) -> Tensor:
        return mix_experts(self.x, self.experts, "triton", in_parts=True)


def cuts_of(case: Case, gated: bool) -> list[Tuning]:
    """Return the cuts that are worth trying for a product, the default one first."""
    weight = case.experts.gate_up if gated else case.experts.down
    rows = tile_rows(len(case.x) * case.experts.chosen, case.count)
    inputs = case.x.shape[1] if gated else len(case.experts.gate_up) // case.count // 2
    default = default_cut(weight, inputs, rows, gated)
    bytes_of_input = weight.nbytes / len(weight) / inputs
    depths = [weight.span] if isinstance(weight, GroupedWeight) else [each for each in DEPTHS if inputs % each == 0]
    tried = [default]
    for columns, depth, stages in product(COLUMNS, depths, STAGES):
        lines = 2 * columns if gated else columns
        if stages * depth * (lines * bytes_of_input + 2 * rows) in STAGED:
            tried.append(Tuning(columns, depth, 8 if lines > 128 else 4, stages))
    return list(dict.fromkeys(tried))


def measure(case: Case, name: str, bandwidth: float, repeats: int, tries: bool) -> list[TimedRow]:
    """Time the whole mixture, its routing and its two products, these also with other cuts if `tries`."""
    choice, tiles = case.route()
    inner = case.multiply_gated(tiles)
    read = len(choice.ids.unique()) / case.count
    of_each = case.experts.gate_up.nbytes * read, case.experts.down.nbytes * read
    gated, down = (cuts_of(case, each)[: None if tries else 1] for each in (True, False))
    works: list[tuple[str, float, Callable[[], object]]] = [
        ("all", sum(of_each) + case.experts.router.nbytes, case.mix),
        ("routing", case.experts.router.nbytes, case.route),
    ]
    works += [
        (f"gate and up, {cut_in_words(cut)}", of_each[0], partial(case.multiply_gated, tiles, cut)) for cut in gated
    ]
    works += [
        (f"down, {cut_in_words(cut)}", of_each[1], partial(case.multiply_down, inner, tiles, choice, cut))
        for cut in down
    ]
    if case.x.is_cuda:
        compile_ahead([partial(partial, several_times, work, 1) for _, _, work in works])
    table = []
    for what, size, work in works:
        try:
            ms = graph_milliseconds(partial(several_times, work), repeats) / TIMES
        except Exception as error:
            if "out of resource" not in str(error):  # Triton's, of a program that takes more memory than there is
                raise
            print(f"{name}: {what}: left out, a program takes more memory than there is")
            continue
        table.append(TimedRow(f"{name}: {what}", ms, 1e3 * size / bandwidth))
    return table


def several_times(work: Callable[[], object], times: int = TIMES) -> None:
    for _ in range(times):
        work()


def cut_in_words(cut: Tuning) -> str:
    return f"{cut.columns} x {cut.depth}, {cut.stages} stages, {cut.warps} warps"


@torch.inference_mode()
def run(flags: argparse.Namespace) -> None:
    """Measure, print the table, and write it to the JSON file if one is named. Raises ValueError without a GPU."""
    require_gpu()
    shape, bandwidth = read_shape_of(flags.shape), copy_bandwidth()
    if not shape.experts:
        raise ValueError(f"--shape {flags.shape} has no experts: give 30b-a3b, or a model with a mixture of experts")
    table: list[TimedRow] = []
    for quantization in flags.quantization:
        experts = random_experts(shape, quantization)
        for rows in flags.rows:
            x = torch.randn(rows, shape.hidden_size, device="cuda").to(experts.router.dtype)
            table += measure(Case(x, experts), f"{quantization}, {rows} rows", bandwidth, flags.repeats, flags.cuts)
        del experts
        torch.cuda.empty_cache()
    end_compiling()
    report(flags, bandwidth, table, "cuts: outputs x inputs of a step of a program, the default first")
