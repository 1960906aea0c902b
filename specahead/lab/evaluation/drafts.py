"""What sparse draft steps cost: a study of drafts as they are served, and its tables.

The draft's rounds are those of the runner that serves them, without graphs where there is no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.loading.model import default_device, load_model, resolve_dtype
from specahead.engine.loading.runner import make_runner
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.cases import RECALL, Case, perplexity_cases, recall_cases
from specahead.lab.evaluation.continuations import GAMMA, DraftSums, measure_case
from specahead.lab.evaluation.models import load_runner
from specahead.lab.evaluation.run import Pair
from specahead.lab.evaluation.workers import held_models, memory_of, run_in_workers
from specahead.lab.results import Columns
from specahead.sparsity.plan import Plan

TEXT, ANSWERS = "drafts of text", "drafts of answers"  # the tables' names
READ_SHARES = (1.0, 0.25, 0.1)  # that are compared, the first one dense


@dataclass(frozen=True)
class DraftRow:
    """What a draft is worth whose passes behind a round's first read a share of the KV."""

    read_share: float
    drafted: int
    """Tokens."""
    accepted: float
    """Share of them that the target accepted."""
    mass: float
    """Share of the target's attention on announced and mandatory blocks."""
    middle: float
    """Share of its attention beyond mandatory blocks that lies on announced ones."""
    kv_read: float
    """Blocks read, over those that dense drafts read."""


def to_rows(shares: Sequence[float], results: list[DraftSums]) -> list[DraftRow]:
    return [
        DraftRow(
            share,
            sums.drafted,
            sums.accepted / sums.drafted,
            sums.mass / sums.rounds,
            (sums.mass - sums.mandatory) / (sums.rounds - sums.mandatory),
            sums.read / sums.present,
        )
        for share, sums in zip(shares, results, strict=True)
    ]


COLUMNS: Columns[DraftRow] = {
    "read share": lambda row: f"{row.read_share:g}",
    "drafted": lambda row: str(row.drafted),
    "accepted": lambda row: f"{row.accepted:.2%}",
    "attention": lambda row: f"{row.mass:.2%}",
    "beyond window": lambda row: f"{row.middle:.2%}",
    "KV read": lambda row: f"{row.kv_read:.1%}",
}


def run_study(
    pair: Pair,
    plan: Plan,
    texts: dict[str, str],
    context: int = 3000,
    passages: int = 4,
    generated: int = 64,
    recalled: int = 12,
    gamma: int = GAMMA,
    workers: int = 0,
) -> dict[str, list[DraftRow]]:
    """Return a table for TEXT and one for ANSWERS, each with a row for each of READ_SHARES.

    context: tokens of each case. passages: of each text, continued by `generated` tokens. recalled: questions of each
    kind that are answered. workers: 0: one a core; results do not depend on it. Raises ValueError for texts that are
    too short and where memory does not suffice.
    """
    tokenizer = load_tokenizer(pair.target)
    tasks = {
        TEXT: perplexity_cases(texts, tokenizer, context, context, passages),
        ANSWERS: recall_cases(list(RECALL), texts, tokenizer, context, recalled),
    }
    cases = [(name, case) for name, chosen in tasks.items() for case in chosen]
    room = max(len(case.tokens) for _, case in cases) + generated + 2 * (gamma + 1)
    totals = {name: [DraftSums() for _ in READ_SHARES] for name in tasks}
    both, dtype = 2 * room + 2 * PAGE_SIZE, resolve_dtype("auto", default_device(), pair.target)
    memory = memory_of([(pair.draft, both), (pair.target, both)], dtype, gamma + 1)
    work = [(plan, case, READ_SHARES, generated, gamma) for _, case in cases]
    results = run_in_workers(_measure, work, partial(load_pair, pair, room), memory, workers, "drafts")
    for (name, _), sums in zip(cases, results, strict=True):
        for total, part in zip(totals[name], sums, strict=True):
            total.add(part)
    return {name: to_rows(READ_SHARES, sums) for name, sums in totals.items() if sums[0].drafted}


def load_pair(pair: Pair, context: int) -> tuple[ModelRunner, ModelRunner]:
    """Draft and target, for one sequence of `context` tokens and a fork of it."""
    device = default_device()
    dtype = resolve_dtype("auto", device, pair.target)
    room = 2 * context + 2 * PAGE_SIZE
    draft = make_runner(load_model(pair.draft, dtype, device), room, max_context=context)
    return draft, load_runner(pair.target, dtype, device, room)


def _measure(plan: Plan, case: Case, shares: Sequence[float], generated: int, gamma: int) -> list[DraftSums]:
    draft, target = held_models()
    return measure_case(draft, target, plan, case, shares, generated, gamma)
