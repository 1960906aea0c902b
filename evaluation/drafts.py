"""What sparse draft steps cost: whole rounds of the draft as it is served with, each verified densely by the target.

The draft's rounds are GraphRunner's own, eager where there is no GPU. The target reads everything, so all ways of
drafting lead to the same text, and its weights at the γ + 1 queries of a round say how good the round's announcement
was. Plain text is continued greedily by both; a case that asks for something goes on in its own words to the end of
the answer, and the answer counts: that is where what matters changes from one round to the next.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import numpy as np
import torch
from engine.draft_rounds import RoundMemory, RoundRequest, RoundSettings
from sparsity.whole_rounds import announced_selection, announcement_request, round_settings
from torch import Tensor
from tqdm import tqdm

from engine.families import read_decoder
from engine.graphs import GraphRunner
from engine.inputs import SequenceInput
from engine.kv.pages import PAGE_SIZE, SequenceKV
from engine.loading import default_device, load_runner, load_tokenizer, resolve_dtype
from engine.runner import Runner
from evaluation.cases import RECALL, Case, perplexity_cases, recall_cases
from evaluation.report import align, markdown_table
from evaluation.rounds import prefill
from evaluation.run import Pair
from sparsity.announce import BY_TARGET_HEAD, LEAST_WINDOW
from sparsity.choice import mandatory
from sparsity.methods import check_method, method_named
from sparsity.plan import Plan
from sparsity.selection import BlockSelection

GAMMA = 4
TEXT, ANSWERS = "drafts of text", "drafts of answers"  # the tables' names
READ_SHARES, INTERVALS = (0.25, 0.1), (1, 2, 4)


@dataclass(frozen=True)
class Reading:
    """How a draft reads: read_share and refresh_every of RoundSettings."""

    read_share: float = 1.0
    refresh_every: int = 1


def readings_of(shares: Sequence[float] = READ_SHARES, intervals: Sequence[int] = INTERVALS) -> list[Reading]:
    """Dense rounds, with which all are compared, and each share with each interval."""
    sparse = [share for share in shares if share < 1]
    return [Reading(), *(Reading(share, every) for share in sparse for every in intervals)]


@dataclass
class DraftSums:
    """Of one reading, added up over rounds and passages.

    drafted: tokens that were proposed; of an answer those that stood on right ones. rounds: with such a token. mass:
    of these rounds, each one's share of the target's attention on announced and mandatory blocks; mandatory: of it on
    the latter. read, present: blocks that the draft's passes read, and that dense ones would have, over layers and KV
    heads.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    mass: float = 0.0
    mandatory: float = 0.0
    read: int = 0
    present: int = 0

    def add(self, other: "DraftSums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def settings_of(plan: Plan, gamma: int, reading: Reading) -> RoundSettings:
    return round_settings(plan, gamma, 1, reading.read_share, reading.refresh_every)


def measure_case(
    draft: GraphRunner,
    target: Runner,
    plan: Plan,
    case: Case,
    readings: list[Reading],
    generated: int,
    gamma: int = GAMMA,
) -> list[DraftSums]:
    """The case from its start on, once for each reading: at least `generated` tokens, or to the end of its answer."""
    prompts = SequenceKV(), SequenceKV()
    try:
        for runner, prompt in zip((draft, target), prompts, strict=True):
            prefill(runner, prompt, case.tokens[: case.start - 1])
        results = []
        for reading in readings:
            draft.prepare_rounds(settings_of(plan, gamma, reading))
            results.append(_Continuation(draft, target, plan, case, reading, gamma).run(*prompts, generated))
        return results
    finally:
        for runner, prompt in zip((draft, target), prompts, strict=True):
            runner.kv.release(prompt)


class _Continuation:
    """One passage, continued by one way of drafting."""

    def __init__(
        self, draft: GraphRunner, target: Runner, plan: Plan, case: Case, reading: Reading, gamma: int
    ) -> None:
        self.draft, self.target, self.plan = draft, target, plan
        self.reading, self.gamma, self.case = reading, gamma, case
        self.tokens = case.tokens[: case.start]
        self.memory = RoundMemory()
        self.last: BlockSelection | None = None
        self.sums = DraftSums()

    def run(self, draft_prompt: SequenceKV, target_prompt: SequenceKV, generated: int) -> DraftSums:
        end = len(self.case.tokens) if self.case.asked else len(self.tokens) + generated
        draft_kv, target_kv = self.draft.kv.fork(draft_prompt), self.target.kv.fork(target_prompt)
        try:
            while len(self.tokens) < end:
                self._round(draft_kv, target_kv)
        finally:
            self.draft.kv.release(draft_kv)
            self.target.kv.release(target_kv)
        return self.sums

    def _round(self, draft_kv: SequenceKV, target_kv: SequenceKV) -> None:
        base = len(self.tokens)
        drafted = self._draft(draft_kv, base)
        queries = SequenceInput(
            target_kv,
            [self.tokens[-1], *drafted],
            "all",
            block_size=self.plan.block_size,
            emitting=self.gamma + 1,
        )
        (output,) = self.target.forward([queries])
        assert output.logits is not None and output.block_weights is not None and self.last is not None
        wanted: list[int] = output.logits.argmax(-1).tolist()
        if self.case.asked:
            wanted = self.case.tokens[base : base + self.gamma + 1]
        # zip: the answer may end within the round.
        right = [token == other for token, other in zip(drafted, wanted, strict=False)]
        accepted = next((i for i, same in enumerate(right) if not same), len(right))
        self.tokens += wanted[: accepted + 1]
        for runner, kv in ((self.draft, draft_kv), (self.target, target_kv)):
            runner.kv.truncate(kv, base + accepted)
        self.memory.cut(draft_kv.length)
        places = range(self.gamma)
        if self.case.asked:
            places = range(self.case.asked[0] - base, min(accepted + 1, len(right)))
        counted = [i < accepted for i in places if i >= 0]
        if counted:
            self.sums.rounds += 1
            self.sums.drafted += len(counted)
            self.sums.accepted += sum(counted)
            mass, of_mandatory = announced_mass(output.block_weights, self.last, self.plan, base)
            self.sums.mass += mass
            self.sums.mandatory += of_mandatory

    def _draft(self, kv: SequenceKV, base: int) -> list[int]:
        """γ tokens; what the round announces is the `last` selection from now on."""
        plan = self.plan
        request = RoundRequest(
            kv,
            self.tokens[kv.length :],
            temperature=0.0,
            top_p=1.0,
            uniforms=np.zeros(self.gamma + 1),
            announce=announcement_request(plan, base, self.last),
            memory=self.memory,
            refresh=self.memory.refresh_due(self.reading.refresh_every),
        )
        (output,) = self.draft.draft_rounds([request])
        assert output.words is not None
        self.last = announced_selection(output.words, plan, base)
        kv.length = base + self.gamma
        heads = plan.draft_layers * self.draft.kv.kv_heads
        dense = heads * sum(plan.num_blocks(base + i) for i in range(self.gamma + 1))
        self.sums.present += dense
        self.sums.read += dense if output.blocks_read is None else output.blocks_read
        return output.tokens[: self.gamma]


def announced_mass(weights: Tensor, announced: BlockSelection, plan: Plan, base: int) -> tuple[float, float]:
    """The share of a target's attention on announced and mandatory blocks, and on mandatory ones alone.

    weights: [layers, queries, heads, blocks] float32, of dense attention; sparse layers count.
    """
    blocks = weights.shape[3]
    rows = torch.from_numpy(announced.resized(blocks).matrix())[BY_TARGET_HEAD.expand(plan)]
    always = mandatory(plan, base, blocks, LEAST_WINDOW)
    chosen = rows | always  # [sparse layers, kv_heads, blocks]
    by_kv_head = weights[plan.sparse_layers].cpu().unflatten(2, (plan.target_kv_heads, -1))
    mass = (by_kv_head * chosen[:, None, :, None]).sum(-1).mean()
    return float(mass), float(by_kv_head[..., always].sum(-1).mean())


@dataclass(frozen=True)
class DraftRow:
    """accepted: of `drafted` tokens. mass: of the target's attention, on announced and mandatory blocks; middle: of its
    attention beyond mandatory blocks, on announced ones. kv_read: of what dense drafts read."""

    read_share: float
    refresh_every: int
    drafted: int
    accepted: float
    mass: float
    middle: float
    kv_read: float


def to_rows(readings: list[Reading], results: list[DraftSums]) -> list[DraftRow]:
    return [
        DraftRow(
            reading.read_share,
            reading.refresh_every,
            sums.drafted,
            sums.accepted / sums.drafted,
            sums.mass / sums.rounds,
            (sums.mass - sums.mandatory) / (sums.rounds - sums.mandatory),
            sums.read / sums.present,
        )
        for reading, sums in zip(readings, results, strict=True)
    ]


COLUMNS = ("read share", "refresh every", "drafted", "accepted", "attention", "beyond window", "KV read")


def cells(row: DraftRow) -> list[str]:
    return [
        f"{row.read_share:g}",
        str(row.refresh_every),
        str(row.drafted),
        f"{row.accepted:.2%}",
        f"{row.mass:.2%}",
        f"{row.middle:.2%}",
        f"{row.kv_read:.1%}",
    ]


def to_text(rows: list[DraftRow]) -> str:
    return align([list(COLUMNS), *(cells(row) for row in rows)], left=0)


def to_markdown(rows: list[DraftRow]) -> str:
    return markdown_table([list(COLUMNS), *(cells(row) for row in rows)], left=0)


def to_json(tables: dict[str, list[DraftRow]]) -> str:
    return json.dumps({name: [asdict(row) for row in rows] for name, rows in tables.items()}, indent=1)


@dataclass(frozen=True)
class DraftStudy:
    """passages of each text are continued by `generated` tokens; so many cases of each kind of recall are answered."""

    context: int = 3000
    passages: int = 4
    generated: int = 64
    recalled: int = 12
    gamma: int = GAMMA

    def run(
        self,
        pair: Pair,
        plan: Plan,
        texts: dict[str, str],
        readings: list[Reading],
        kinds: Sequence[str] = tuple(RECALL),
        workers: int = 0,
    ) -> dict[str, list[DraftRow]]:
        """Two tables by name. Raises ValueError for texts that are too short."""
        tokenizer = load_tokenizer(pair.target)
        tasks = {
            TEXT: perplexity_cases(texts, tokenizer, self.context, self.context, self.passages),
            ANSWERS: recall_cases(list(kinds), texts, tokenizer, self.context, self.recalled),
        }
        tasks = {name: cases for name, cases in tasks.items() if cases}
        return measure(pair, plan, tasks, readings, self.generated, self.gamma, workers)


# The models of a worker process: draft, target.
_loaded: tuple[GraphRunner, Runner] | None = None


def measure(
    pair: Pair,
    plan: Plan,
    tasks: dict[str, list[Case]],
    readings: list[Reading],
    generated: int,
    gamma: int = GAMMA,
    workers: int = 0,
) -> dict[str, list[DraftRow]]:
    """A table of each task. workers 0: one a core; results do not depend on it.

    Raises PlanError where the plan has no `ahead`.
    """
    check_method(method_named("ahead"), plan)
    cases = [(name, case) for name, chosen in tasks.items() for case in chosen]
    room = max(len(case.tokens) for _, case in cases) + generated + 2 * (gamma + 1)
    count = min(workers or os.cpu_count() or 1, len(cases))
    totals = {name: [DraftSums() for _ in readings] for name in tasks}
    with ProcessPoolExecutor(count, get_context("spawn"), _load, (pair, room)) as pool:
        pending = [
            (name, pool.submit(_measure, plan, case, readings, generated, gamma)) for name, case in cases
        ]
        for name, future in tqdm(pending, desc="drafts", unit="case"):
            for total, part in zip(totals[name], future.result(), strict=True):
                total.add(part)
    return {name: to_rows(readings, sums) for name, sums in totals.items()}


def load_pair(pair: Pair, context: int, dtype_name: str = "auto") -> tuple[GraphRunner, Runner]:
    """Draft and target, for one sequence of `context` tokens and a fork of it."""
    device = default_device()
    dtype = resolve_dtype(dtype_name, device)
    room = 2 * context + 2 * PAGE_SIZE
    draft, target = (load_runner(name, dtype, device, room) for name in (pair.draft, pair.target))
    return GraphRunner(read_decoder(draft.model), draft, context), target


def _load(pair: Pair, context: int) -> None:
    global _loaded
    if default_device() == "cpu":
        torch.set_num_threads(1)  # the workers share the cores
    _loaded = load_pair(pair, context)


def _measure(plan: Plan, case: Case, readings: list[Reading], generated: int, gamma: int) -> list[DraftSums]:
    assert _loaded is not None
    return measure_case(*_loaded, plan, case, readings, generated, gamma)
