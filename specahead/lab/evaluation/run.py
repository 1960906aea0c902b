"""Evaluating cases in parallel: each worker process holds both models and takes one case at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specahead.config.speculation import KVCacheDtype, Quantization
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.loading.model import default_device, resolve_dtype
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.methods import rival_of
from specahead.lab.evaluation.models import load_runner
from specahead.lab.evaluation.most_alike import maps_of
from specahead.lab.evaluation.rounds import SIDE_BY_SIDE, Variant, VariantSums, evaluate_case
from specahead.lab.evaluation.workers import held_models, memory_of, report_part, run_in_workers
from specahead.sparsity.plan import Plan


@dataclass(frozen=True)
class Pair:
    """Hugging Face ids or folders."""

    target: str
    draft: str
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of the target's KV."""

    quantization: Quantization = "none"
    """Of the target's weights."""


def parse_budget(text: str, plan: Plan) -> Plan:
    """Return a plan with a budget, a share of the KV such as `0.06`; empty: the plan's own.

    A stated budget counts at any length: short texts are read sparsely, too. Raises ValueError for a text that states
    no share.
    """
    try:
        return replace(plan, budget=float(text), least_tokens=0) if text else plan
    except ValueError as error:
        raise ValueError(f"budget {text!r}: a share like 0.06 ({error})") from error


def variants_of(methods: list[str], budgets: list[str], plan: Plan, gamma: int) -> list[Variant]:
    """Return every method with every budget. `dense`, which all rows are compared with, comes first.

    Raises ValueError (PlanError) for an unknown method, one that the plan lacks maps for, or a budget that states no
    share.
    """
    asked = [(budget, parse_budget(budget, plan)) for budget in budgets]
    variants = [Variant("dense", "", plan, gamma)]
    for name in methods:
        rival = rival_of(name)
        if rival is not None and rival.follows_draft:
            maps_of(plan)
        variants += [Variant(name, *each, gamma) for each in asked if name != "dense"]
    return variants


def evaluate(
    pair: Pair,
    cases: list[Case],
    variants: list[Variant],
    workers: int = 0,
    description: str = "evaluating",
    known: Sequence[Mapping[int, VariantSums]] = (),
    on_variant: Callable[[int, int, VariantSums], object] = lambda case, variant, sums: None,
) -> list[VariantSums]:
    """Return the sums of each variant over all cases. workers: 0: one a core; results do not depend on it.

    known: of each case, the sums of variants that need not run again, by their numbers. on_variant: called with the
    numbers of a case and a variant and its sums as soon as they are there, in any order. Raises ValueError where memory
    does not suffice.
    """
    longest, scored = max(len(case.tokens) for case in cases), max(len(case.tokens) - case.start for case in cases)
    room = 2 * longest + SIDE_BY_SIDE * (scored + 2 * PAGE_SIZE)
    longest += PAGE_SIZE
    dtype = resolve_dtype("auto", default_device(), pair.target)
    memory = memory_of([(pair.draft, longest), (pair.target, room)], dtype, scored)
    results: list[dict[int, VariantSums]] = [dict(each) for each in known or [{}] * len(cases)]
    work = []
    for number, (case, done) in enumerate(zip(cases, results, strict=True)):
        missing = {i: variant for i, variant in enumerate(variants) if i not in done}
        if missing:  # the first, which is dense, is what the others are compared with
            work.append((number, case, {0: variants[0]} | missing))
    make = partial(_load, pair, longest, room)
    if work:
        found = run_in_workers(_evaluate, work, make, memory, workers, description, on_variant)
        for (number, *_), sums in zip(work, found, strict=True):
            results[number].update(sums)
    totals = [VariantSums() for _ in variants]
    for done in results:
        for i, total in enumerate(totals):
            total.add(done[i])
    return totals


def _load(pair: Pair, longest: int, target_tokens: int) -> tuple[ModelRunner, ModelRunner]:
    """Load draft and target, with room for a sequence of `longest` tokens, and in the target for forks of it."""
    device = default_device()
    dtype = resolve_dtype("auto", device, pair.target)
    draft = load_runner(pair.draft, dtype, device, longest)
    target = load_runner(
        pair.target,
        dtype,
        device,
        target_tokens,
        kv_cache_dtype=pair.kv_cache_dtype,
        quantization=pair.quantization,
        max_context=longest,
    )
    return draft, target


def _evaluate(number: int, case: Case, variants: dict[int, Variant]) -> dict[int, VariantSums]:
    draft, target = held_models()
    numbers = list(variants)

    def report(index: int, sums: VariantSums) -> None:
        report_part((number, numbers[index], sums))

    return dict(zip(numbers, evaluate_case(draft, target, case, list(variants.values()), report), strict=True))
