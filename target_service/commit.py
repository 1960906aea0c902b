"""Commits a verified round: appends its tokens to the session and cuts the KV to them."""

from specahead.engine.kv.cache import KVCache
from specahead.engine.steps.inputs import SequenceOutput
from specahead.sparsity.plan import Plan
from specahead.wire.messages import At, Commit, FinishReason, Verdict
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound


def commit_round(
    item: VerifyRound,
    output: SequenceOutput,
    verdict: tuple[int, int],
    seconds: float,
    plan: Plan,
    kv: KVCache,
    under_way: int = 0,
) -> tuple[Commit, Verdict]:
    """Append a round's tokens to its session and cut its KV to them. Returns the commit for the session's owner and the
    verdict for its draft.

    verdict: how many tokens were accepted, held tokens first and then drafted ones, and the token that follows them. If
    it rejects held tokens, the session's tokens are cut there. seconds: the step's time. under_way: tokens of the
    session in a step that already runs behind this round.
    """
    session, proposal, (accepted, following) = item.session, item.proposal, verdict
    if output.alternative is not None:
        item.input.tokens[accepted] = output.alternative  # they begin with the last committed one
    base, proposed, confirmed = len(session.tokens) - item.held, item.proposed, min(accepted, item.held)
    if confirmed < item.held:
        del session.tokens[base + confirmed :]
        proposal, proposed = None, []
    before, key, stats, accepted = session.at, session.key, session.stats, accepted - confirmed
    text = [*session.tokens[base:], *proposed[:accepted], following]
    text, finish = cut_at_end(text, session.asked.max_length - base, session.asked.stop_token_ids)
    tokens = text[confirmed:]
    # A draft that was lost or has asked for Begin during the step does not know this round.
    known = proposal is not None and (proposal.at.epoch, proposal.at.round) == key
    judged = proposal if known else None
    agreed = judged is not None and session.foresaw(before.base + accepted + 1, following)
    tokens_read, tokens_total = _tokens_read(session, session.kv.length - under_way, plan, kv)
    commit = Commit(
        at=before if base == before.base else before._replace(base=base),
        tokens=text,
        drafted=len(proposed),
        accepted=min(accepted, len(tokens)),
        finish_reason=finish,
        kv_tokens_read=tokens_read,
        kv_tokens_total=tokens_total,
        kv_tokens_fetched=output.tokens_fetched,
        cached_tokens=stats.cached_tokens,
        sparse_prompt_tokens=stats.sparse_prompt_tokens,
        queue_seconds=stats.queue_seconds,
        preemptions=stats.preemptions,
        announced_bytes=stats.announced_bytes,
        stale_rounds=stats.stale_rounds,
        prefill_seconds=stats.prefill_seconds,
        wait_seconds=item.wait_seconds,
        draft_seconds=proposal.draft_seconds if proposal is not None else 0.0,
        verify_seconds=seconds,
        logprobs=output.logprobs[: len(text)],
        prompt_logprobs=session.prompt_logprobs or [],
        screened=item.held,
        confirmed=confirmed,
    )
    session.prompt_logprobs = None
    session.commit(tokens, agreed, judged)
    kv.truncate(session.kv, len(session.tokens) - 1 + under_way)
    at = At(before.session, session.epoch, session.round, before.base)
    return commit, Verdict(at, commit.accepted, tokens, judged is None)


def cut_at_end(tokens: list[int], room: int, stop_token_ids: frozenset[int]) -> tuple[list[int], FinishReason]:
    """Return the tokens up to and with the first stop token, `room` tokens at most, and why they end, if they do."""
    for i, token in enumerate(tokens[:room]):
        if token in stop_token_ids:
            return tokens[: i + 1], FinishReason.STOP
    if len(tokens) >= room:
        return tokens[:room], FinishReason.LENGTH
    return tokens, FinishReason.NONE


def _tokens_read(session: TargetSession, length: int, plan: Plan, kv: KVCache) -> tuple[int, int]:
    """Return how many (layer, KV head, token) triples a round over `length` tokens read, and how many there were."""
    if session.reading.reader is not None:
        read, total = session.reading.reader.tokens_read
        return round(read), total
    blocks = plan.num_blocks(length)  # whole blocks, as a sparse read counts them
    everything = kv.num_layers * kv.kv_heads * blocks * plan.block_size
    return everything, everything
