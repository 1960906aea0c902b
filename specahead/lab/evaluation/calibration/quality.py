"""What a new plan costs in quality, measured at several budgets on the texts that it was made from."""

import math
from dataclasses import replace

from tqdm import tqdm

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.rounds import Variant, VariantSums, evaluate_case
from specahead.sparsity.plan import Plan

BUDGETS = (0.03, 0.06, 0.12, 0.25)
SCORED = 512  # the last tokens of a passage, at most
MOST_PASSAGES = 4


def room_of(context: int) -> int:
    """Return for how many tokens the target needs KV room, where passages have `context` tokens."""
    return 2 * context + (len(BUDGETS) + 2) * (SCORED + 2 * PAGE_SIZE)


def quality_over_budget(
    draft: ModelRunner, target: ModelRunner, plan: Plan, texts: list[list[int]], gamma: int
) -> list[dict[str, float]]:
    """Return, for each budget in rising order, the share of the KV that rounds read, how much the perplexity rises
    over the dense one's, and the mean total variation from the dense distributions. texts: token ids; a few of them are
    read.
    """
    budgets = sorted({plan.budget, *(each for each in BUDGETS if not 0.7 < each / plan.budget < 1.4)})
    variants = [Variant("dense", "", plan, gamma)]
    variants += [Variant("ahead", str(each), replace(plan, budget=each, least_tokens=0), gamma) for each in budgets]
    totals = [VariantSums() for _ in variants]
    apart = -(-len(texts) // MOST_PASSAGES)
    for tokens in tqdm(texts[::apart], desc="measuring quality", unit="passage"):
        case = Case("", tokens, len(tokens) - min(SCORED, len(tokens) // 2))
        for total, part in zip(totals, evaluate_case(draft, target, case, variants), strict=True):
            total.add(part)
    dense, *sparse = totals
    return [
        {
            "budget": budget,
            "kv_read": round(sums.read / sums.present, 4),
            "increase": round(math.exp(sums.nll / sums.scored - dense.nll / dense.scored) - 1, 5),
            "total_variation": round(sums.varied / sums.judged, 4),
        }
        for budget, sums in zip(budgets, sparse, strict=True)
    ]
