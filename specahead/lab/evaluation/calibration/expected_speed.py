"""How much faster than plain decoding rounds may be expected to be, by the sizes that a target's policy starts from."""

from collections.abc import Callable

from specahead.config.speculation import Speculation
from specahead.engine.steps.requests import gammas
from specahead.sparsity.plan import Plan
from target_service.policy import Acceptance, Load, Options, Proposer, Sizes
from target_service.policy.gains import kinds_of

BATCHES = (1, 4, 16, 64)
CONTEXTS = tuple(1024 << i for i in range(2, 8))  # 4K to 128K
MOST_GAMMA = 4


def expected_speeds(plan: Plan, exactness: str) -> Callable[[int, int], float]:
    """Return a function of a context and a batch that says how many times as fast as plain decoding its requests are
    expected to be, if the fastest number of tokens is drafted.

    For a GPU whose passes take the time of reading weights and KV, where the draft runs beside the target. The plan's
    provenance must have `acceptance` and `weight_tokens`.
    """
    layers = 1 - len(plan.sparse_layers) / plan.target_layers
    sizes = Sizes(plan.provenance["weight_tokens"], plan.budget, plan.least_tokens, dense_layers=layers)
    options = Options(Proposer.DRAFT, tuple(gammas(MOST_GAMMA)), adaptive=True, announced=True)
    accepted = Acceptance([plan.acceptance or 0.0] * MOST_GAMMA)

    def speed(context: int, batch: int) -> float:
        tokens = context * batch
        loads = [Load(batch, tokens, skipped=max(0, tokens - batch * Speculation.draft_context))]
        if exactness == "approximate":  # these requests are served exactly where that is faster
            loads.append(Load(batch, tokens, announcing=tokens))
        kinds = [(load, kinds_of(plan, load)[0]) for load in loads for plan in options.plans(load)]
        rates = (accepted.tokens(kind.gamma) / sizes.round(kind, load) for load, kind in kinds)
        return max(rates) * sizes.plain(loads[0])

    return speed
