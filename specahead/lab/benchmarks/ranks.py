"""`specahead bench ranks`: steps and prompts of a target over one GPU and over several, as the service runs them.

Weights are random, the same for each number of ranks. A time is what a call of the runner takes: the host lays a step
out and tells it to the ranks, these run it as a CUDA graph, and its verdicts come back. Beside it stands what the graph
takes by itself, and after the table what one sum over ranks takes within a graph.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specahead.config import TargetSettings
from specahead.engine.kv.pages import SequenceKV, pages_for
from specahead.engine.loading.model import default_device
from specahead.engine.loading.opening import OpenedModel, open_model
from specahead.engine.parallel.processes import RankProcesses
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.shapes import PassShape
from specahead.lab.benchmarks.model_folders import write_model
from specahead.lab.benchmarks.rank_sums import sum_microseconds
from specahead.lab.benchmarks.shapes import SHAPES
from specahead.sparsity.plan import Plan, uniform_plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection

GAMMA = 4
CHUNK = 8192  # prompt tokens of a pass
GREEDY = Sampling(0.0)


@dataclass
class Measured:
    """One kind of pass over one number of ranks."""

    milliseconds: float
    """The median over the repeats."""
    tokens: list[int]
    """The next token of each sequence."""


def run(flags: argparse.Namespace) -> None:
    """Measure and print the table. Raises ValueError for more ranks than GPUs."""
    context, batch, device = max(flags.contexts), max(flags.batch), default_device()
    shape, table = SHAPES[flags.shape], dict[int, dict[str, Measured]]()
    plan = uniform_plan(shape.num_hidden_layers, shape.num_key_value_heads, 1, 1, budget=flags.budget, least_tokens=0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_model(model, shape, shape.vocab_size, context + 1024)
        for count in flags.ranks:
            settings = TargetSettings(
                model=str(model),
                draft="none",
                load_format="dummy",
                device=device,
                max_context=context + 512,
                kv_tokens=batch * (context + 512),
                tensor_parallel_size=count,
                quantization=flags.quantization,
                kv_cache_dtype=flags.kv_cache_dtype,
            )
            # In a process of its own, since a process meets others in symmetric memory only once (small_sums.py).
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
                table[count] = own.submit(_measure_all, settings, plan, flags).result()
    print(_report(table))
    if device != "cpu":
        rows = sorted({batch * queries for batch in flags.batch for queries in (1, 1 + GAMMA)})
        for count in flags.ranks:
            if count > 1:
                print(_report_sums(count, rows, shape.hidden_size))


def _measure_all(settings: TargetSettings, plan: Plan, flags: argparse.Namespace) -> dict[str, Measured]:
    processes = RankProcesses(settings) if settings.tensor_parallel_size > 1 else None

    def open_part(*rank: object) -> OpenedModel:
        return open_model(settings, "none", *rank)  # type: ignore[arg-type]

    runner = (open_part() if processes is None else processes.open(open_part)).runner
    assert isinstance(runner, ModelRunner)
    runner.keep_memories(2 * max(flags.batch))
    runner.kv.keep_group_means(plan.group_size)
    measured: dict[str, Measured] = {}
    for context in flags.contexts:
        for batch in flags.batch:
            rows = _measure(runner, plan, batch, context, flags.repeats)
            for what, row in rows.items():  # the table comes last
                print(f"{settings.tensor_parallel_size} GPUs: {what}: {row.milliseconds:.2f} ms", file=sys.stderr)
            measured |= rows
    if processes is not None:
        processes.stop()
    return measured


def _measure(runner: ModelRunner, plan: Plan, batch: int, context: int, repeats: int) -> dict[str, Measured]:
    """Return the times of all kinds of passes over `batch` sequences of `context` tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, runner.vocab_size, (batch, context)).tolist()
    sequences, seconds = [SequenceKV() for _ in prompts], list[float]()
    for kv, prompt in zip(sequences, prompts, strict=True):
        for start in range(0, context, CHUNK):
            began = time.perf_counter()
            runner.forward([SequenceInput(kv, prompt[start : start + CHUNK])])
            _wait(runner)
            seconds.append(time.perf_counter() - began)
    readers = [Reader(plan) for _ in prompts]
    nothing = BlockSelection.of_nothing(readers[0].announced_rows, plan.num_blocks(context))

    def step(queries: int, sparse: bool) -> Callable[[], list[SequenceOutput]]:
        def once() -> list[SequenceOutput]:
            inputs = []
            for kv, reader in zip(sequences, readers, strict=True):
                drafted = Drafted([1] * (queries - 1), [], GREEDY, context + 1)
                read = reader.read(nothing, context + 1, context + queries) if sparse else None
                inputs.append(SequenceInput(kv, [1] * queries, "all", read, drafted))
            outputs = runner.forward(inputs)
            for kv in sequences:
                runner.kv.truncate(kv, context)
            return outputs

        return once

    kinds = {"1 query, dense": step(1, False), f"{1 + GAMMA} queries, dense": step(1 + GAMMA, False)}
    kinds[f"{1 + GAMMA} queries, {plan.budget:.0%} of the blocks"] = step(1 + GAMMA, True)
    rows: dict[str, Measured] = {}
    for what, once in kinds.items():
        rows[f"{what}, {batch} x {context}"] = _timed(once, repeats)
        if runner.passes.graphs.captures:
            rows[f"{what}, {batch} x {context}, the graph"] = Measured(_graph_milliseconds(runner, repeats), [])
    part = f"{min(CHUNK, context)} tokens of a prompt, 1 x {context}, {pages_for(context)} pages"
    for kv in sequences:
        runner.kv.release(kv)
    return {part: Measured(1e3 * float(np.median(seconds)), [])} | rows


def _timed(once: Callable[[], list[SequenceOutput]], repeats: int) -> Measured:
    outputs, seconds = once(), list[float]()  # captures, and compiles kernels
    for _ in range(repeats):
        began = time.perf_counter()
        outputs = once()
        seconds.append(time.perf_counter() - began)
    return Measured(1e3 * float(np.median(seconds)), [output.verdict[1] for output in outputs if output.verdict])


def _graph_milliseconds(runner: ModelRunner, repeats: int) -> float:
    """Return what the graph of the last step takes on all ranks, launched again and again without waiting for it."""
    shape, step = next(reversed(runner.passes.graphs.by_shape.items()))
    assert isinstance(shape, PassShape)
    began = time.perf_counter()
    for _ in range(repeats):
        runner.kv.ranks.followers.tell_step(shape)
        step.run()
    _wait(runner)
    return 1e3 * (time.perf_counter() - began) / repeats


def _wait(runner: ModelRunner) -> None:
    if runner.kv.device.type == "cuda":
        torch.cuda.synchronize()


def _report(table: dict[int, dict[str, Measured]]) -> str:
    """Return a line for each kind of pass: its time for each number of ranks, and how many tokens are those of the
    first number's.
    """
    first = next(iter(table.values()))
    width = max(map(len, first))
    lines = [f"{'milliseconds of a call, by ranks':<{width}}" + "".join(f"{count:>20}" for count in table)]
    for what, base in first.items():
        line = f"{what:<{width}}"
        for measured in table.values():
            own = measured[what]
            same = sum(one == two for one, two in zip(own.tokens, base.tokens, strict=True))
            told = f" ({same}/{len(base.tokens)} alike)" if base.tokens else ""
            line += f"{f'{own.milliseconds:.3f}{told}':>20}"
        lines.append(line)
    return "\n".join(lines)


def _report_sums(count: int, rows: list[int], hidden: int) -> str:
    lines = [
        f"{count} GPUs: a sum of {each} x {hidden} in a graph: {own:.1f} us, by NCCL {nccl:.1f} us"
        for each, (own, nccl) in zip(rows, sum_microseconds(count, rows, hidden), strict=True)
    ]
    return "\n".join(lines)
