"""A runner over KV in tiers against one whose KV all lies on the device: the same logits, bit by bit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead import models
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import OutOfPages, SequenceKV
from specahead.engine.kv.tier_memory import TierCounters
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.kernels.kv_scales import KVScales
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from tests.books import random_tokens as tokens
from tests.plans import bundled_plan
from tests.unit.tiny_models import save_mixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, CONTEXT = 4, 900
PLAN = bundled_plan(group_size=128)
LENGTHS = (700, 330, 90)
PAGES = 16384 // 16


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(str(models.TARGET), torch.float32, DEVICE)


class Side:
    """A runner and its sequences, each with its prompt read and a reader of its own."""

    def __init__(self, model: Any, gpu_pages: int, plan: Plan, method: str, eight_bit: bool) -> None:
        sizes = 16 * (gpu_pages or PAGES), 16 * PAGES if gpu_pages else 0, CONTEXT
        heads = model.shape.num_layers, 2, model.shape.num_kv_heads
        scales = KVScales(
            torch.full(heads, 2.0**-5, device=DEVICE), torch.randn(*heads, model.shape.head_dim, device=DEVICE)
        )
        self.runner = make_runner(model, *sizes, kv_scales=scales if eight_bit else None)
        self.kv: KVCache = self.runner.kv
        self.plan = plan
        self.kv.keep_group_means(plan.group_size)
        self.fetched = 0  # tokens, by what outputs say
        self.runner.warm_up([], 1)
        self.sequences = [SequenceKV() for _ in LENGTHS]
        self.readers = [None if method == "dense" else Reader(plan, True) for _ in LENGTHS]

    def read_prompts(self, chunk: int) -> list[Tensor]:
        """In chunks of all that have some left, side by side."""
        logits = []
        for start in range(0, max(LENGTHS), chunk):
            inputs = [
                SequenceInput(kv, tokens(length, i)[start : start + chunk], "last")
                for i, (length, kv) in enumerate(zip(LENGTHS, self.sequences, strict=True))
                if start < length
            ]
            logits += [output.logits for output in self.runner.forward(inputs)]
        return logits

    def round(self, turn: int, choices: list[BlockSelection | None], judged: bool) -> list[Tensor]:
        """The logits of a round, or its verdicts; some of its tokens are taken back."""
        inputs = []
        for i, (kv, reader, choice) in enumerate(zip(self.sequences, self.readers, choices, strict=True)):
            base = kv.length + 1
            read = None if reader is None else reader.read(choice, base, kv.length + GAMMA + 1)
            chosen = tokens(GAMMA + 1, 10 * turn + i)
            drafted = Drafted(chosen[1:], [], Sampling(0.0), base) if judged else None
            inputs.append(SequenceInput(kv, chosen, "all", read, drafted=drafted))
        outputs = self.runner.forward(inputs)
        for reader, output in zip(self.readers, outputs, strict=True):
            if reader is not None:
                reader.finish(output)
        for i, kv in enumerate(self.sequences):
            self.kv.truncate(kv, kv.length - (turn + i) % 3)
        self.fetched += sum(output.tokens_fetched for output in outputs)
        return [torch.tensor(o.verdict) if judged else o.logits for o in outputs]

    def announced(self, rng: np.random.Generator, newest: float = 0.0) -> list[BlockSelection | None]:
        """newest: a share of the blocks, the newest ones, that each row has; 0: each row has others, at random."""
        choices: list[BlockSelection | None] = []
        for kv, reader in zip(self.sequences, self.readers, strict=True):
            rows = 0 if reader is None else reader.announced_rows
            chosen = rng.random((rows, self.plan.num_blocks(kv.length + 1))) < 0.05
            if newest:
                chosen[:] = np.arange(chosen.shape[1]) >= (1 - newest) * chosen.shape[1]
            choices.append(BlockSelection.from_matrix(chosen) if rows else None)
        return choices


@dataclass(frozen=True)
class Case:
    """What is run. silent: the turn in which the second sequence has no announcement, and reads everything. newest: as
    of `Side.announced`.
    """

    method: str = "ahead"
    plan: Plan = PLAN
    silent: int = -1
    chunk: int = 200
    turns: int = 3
    newest: float = 0.0
    eight_bit: bool = False


@dataclass
class Outcome:
    """All outputs in order, group means at the end, the KV, and its counters before the first round."""

    outputs: list[Tensor]
    means: list[Tensor]
    kv: KVCache
    before: TierCounters
    fetched: int  # tokens of rounds, by what outputs say

    @property
    def tiered(self) -> TieredKV:
        return self.kv

    @property
    def stages(self) -> int:
        """How often rounds brought whole sequences together."""
        return self.tiered.counters.stages - self.before.stages


def run(model: Any, gpu_pages: int, case: Case) -> Outcome:
    """gpu_pages 0: all KV lies on the device. The last round is judged."""
    torch.manual_seed(0)
    side = Side(model, gpu_pages, case.plan, case.method, case.eight_bit)
    outputs = side.read_prompts(case.chunk)
    before = replace(side.kv.counters) if isinstance(side.kv, TieredKV) else TierCounters()
    rng = np.random.default_rng(0)
    for turn in range(case.turns):
        choices = side.announced(rng, case.newest)
        if turn == case.silent:
            choices[1] = None
        outputs += side.round(turn, choices, judged=turn == case.turns - 1)
        if isinstance(side.kv, TieredKV):
            side.kv.check_integrity()
    pool = side.kv.means
    groups = [slot for kv in side.sequences for slot in kv.groups]
    means = [values[:, groups].cpu() for values in (pool.k, pool.v, pool.k_variance)]
    return Outcome(outputs, means, side.kv, before, side.fetched)


@pytest.fixture(scope="module")
def plain(model: Any) -> Callable[[Case], Outcome]:
    """The outcome without tiers, of each case once."""
    return lru_cache(lambda case: run(model, 0, case))


def check(model: Any, plain: Callable[[Case], Outcome], gpu_pages: int, case: Case, exactly: bool = True) -> Outcome:
    wanted, got = plain(case), run(model, gpu_pages, case)
    for one, other in zip(wanted.outputs + wanted.means, got.outputs + got.means, strict=True):
        compare(other, one, exactly, 0.02 if case.eight_bit else 1e-4)  # rounding to 8 bits magnifies differences
    return got


def compare(got: Tensor, wanted: Tensor, exactly: bool, tolerance: float = 1e-4) -> None:
    if exactly:
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def with_plan(**changes: Any) -> Case:
    return Case(plan=replace(PLAN, **changes))


# The sequences have 74 pages in all.


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("gpu_pages", [80, 45])
def test_a_shared_budget_over_what_is_fetched(model: Any, plain: Any, gpu_pages: int, eight_bit: bool) -> None:
    """From GPU pages for everything on; group means are made from pages that are in the backing store alone, too."""
    got = check(model, plain, gpu_pages, Case(eight_bit=eight_bit))
    assert got.tiered.offload_active == (gpu_pages < 80)
    assert (got.tiered.counters.fetched_pages > 0) == (gpu_pages < 80)
    assert (got.tiered.counters.overflow_pages, got.stages) == (0, 0)
    assert len(got.means[0][0]) == 7


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Announced blocks are fetched for it as for a dense model."""
    save_mixture(tmp_path)
    mixture = load_model(str(tmp_path), torch.float32, DEVICE)
    got = check(mixture, lambda case: run(mixture, 0, case), 45, Case(turns=2), exactly=False)
    assert got.tiered.counters.fetched_pages > 0


def test_blocks_of_several_pages(model: Any, plain: Any) -> None:
    got = check(model, plain, 45, with_plan(block_size=64))
    assert got.tiered.counters.fetched_pages > 0
    assert got.stages == 0


@pytest.mark.parametrize("eight_bit", [False, True])
def test_what_reads_everything_is_brought_together(model: Any, plain: Any, eight_bit: bool) -> None:
    got = check(model, plain, 40, Case(method="dense", eight_bit=eight_bit), False)
    assert got.stages > 0
    assert got.tiered.counters.fetched_pages == 0


def test_a_round_that_reads_everything_beside_sparse_ones(model: Any, plain: Any) -> None:
    got = check(model, plain, 45, Case(silent=1))
    assert got.stages == 1
    assert got.tiered.counters.fetched_pages > 0


def test_layers_that_are_read_densely_bring_all_together(model: Any, plain: Any) -> None:
    got = check(model, plain, 45, with_plan(dense_layers=(0, 3)), False)
    assert got.stages == 6  # of three rounds, each in two parts: there is room for 65 of 74 pages
    assert got.tiered.counters.fetched_pages == 0


def test_what_is_not_fetched_at_once_is_fetched_in_parts(model: Any, plain: Any) -> None:
    """Without staging: what overflowed together has run apart."""
    got = check(model, plain, 36, Case(newest=0.6), exactly=False)
    assert got.tiered.counters.overflow_pages > 0
    assert got.stages == 0


@pytest.mark.parametrize("method", ["ahead", "dense"])
def test_the_fewest_gpu_pages_that_work(model: Any, plain: Any, method: str) -> None:
    """Two pages of each of three sequences are written at once."""
    case = Case(method=method, chunk=32)
    check(model, plain, 6, case, exactly=False)
    with pytest.raises(OutOfPages, match="6 GPU pages wanted, 5 of 5 can be given"):
        run(model, 5, case)
