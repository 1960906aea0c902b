"""The handshake of a draft that has opened its model."""

from specahead.config import DraftSettings
from specahead.engine.loading.opening import OpenedModel
from specahead.sparsity.plan import Plan, PlanError
from specahead.wire.handshake import make_hello
from specahead.wire.messages import Hello


def draft_hello(settings: DraftSettings, plan: Plan, opened: OpenedModel) -> Hello:
    """Return the first message to a target. Raises PlanError if the plan is for another draft."""
    planned = plan.draft_layers, plan.draft_heads
    actual = opened.shape.num_layers, opened.shape.num_heads
    if planned != actual:
        raise PlanError(f"{settings.plan} is for a draft of (layers, heads) {planned}, {settings.model} has {actual}")
    return make_hello(settings, plan, opened.shape.vocab_size, opened.tokenizer_hash)
