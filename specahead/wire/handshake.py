"""The Hello in which each side of a pair says what it serves."""

from specahead.config import ServiceSettings
from specahead.sparsity.plan import Plan
from specahead.wire.messages import Hello


def make_hello(settings: ServiceSettings, plan: Plan, vocab_size: int, tokenizer_hash: str) -> Hello:
    """Return the Hello of a side with these settings."""
    return Hello(
        peer=settings.name or settings.side,
        model=settings.model,
        vocab_size=vocab_size,
        tokenizer_hash=tokenizer_hash,
        plan_hash=plan.hash,
        gamma=settings.most_drafted,
        block_size=plan.block_size,
    )
