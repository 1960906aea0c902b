"""Commits a verified round: appends its tokens to the session and cuts the KV to them."""

import numpy as np

from specahead.engine.kv.cache import KVCache
from specahead.engine.steps.inputs import SequenceOutput
from specahead.sparsity.plan import Plan
from specahead.wire.messages import At, Commit, FinishReason, Proposal, Proposer, RoundFigures, Verdict
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound


def commit_round(
    item: VerifyRound,
    output: SequenceOutput,
    verdict: tuple[int, int],
    seconds: float,
    plan: Plan,
    kv: KVCache,
    queued: int = 0,
) -> tuple[Commit, bool]:
    """Append a round's tokens to its session, and truncate its KV. Return the commit for the session's owner, and
    whether the session's draft knows the round (`verdict_on`).

    verdict: how many tokens are accepted, held ones first, and the token after them. seconds: the step's time. queued:
    tokens of the session in a step that was launched after this one.
    """
    session, (accepted, following) = item.session, verdict
    if output.alternative is not None:
        item.input.tokens[accepted] = output.alternative  # they begin with the last committed one
    confirmed, proposal, proposed = _confirm_held(item, accepted)
    before, accepted = len(session.tokens), accepted - confirmed
    base = before - confirmed
    audited = None if output.divergence is None else output.divergence[: accepted + 1]
    text = [*session.tokens[base:], *proposed[:accepted], following]
    text, finish = cut_at_end(text, session.asked.max_length - base, session.asked.stop_token_ids)
    tokens = text[confirmed:]
    # A draft that was lost or has asked for Begin during the step does not know this round.
    known = proposal is not None and (proposal.at.epoch, proposal.at.round) == session.key
    agreed = known and session.foresaw(before + accepted + 1, following)
    read, total = _tokens_read(item, session.kv.length - queued, plan, kv)
    commit = Commit(
        at=At(session.id, session.epoch, session.round, base),
        tokens=text,
        drafted=len(proposed),
        accepted=min(accepted, len(tokens)),
        finish_reason=finish,
        figures=_figures(item, output, (read, total), proposal, seconds, audited),
        cached_tokens=session.stats.cached_tokens,
        logprobs=output.logprobs[: len(text)],
        prompt_logprobs=session.prompt_logprobs or [],
        screened=item.held,
        confirmed=confirmed,
        proposer=item.proposer if proposed else Proposer.NOBODY,
    )
    session.prompt_logprobs = None
    session.commit(tokens, agreed, proposal if known else None)
    kv.truncate(session.kv, len(session.tokens) - 1 + queued)
    return commit, known


def verdict_on(commit: Commit, known: bool, session: TargetSession) -> Verdict:
    """Return the verdict for the draft of a session whose last round was just committed, with what its next round is to
    propose. known: whether the draft knows the round.
    """
    gamma, dense = session.draft_request
    tokens = commit.tokens[commit.confirmed :]
    at = At(session.id, session.epoch, session.round, commit.at.base + commit.confirmed)
    return Verdict(at, commit.accepted, tokens, not known, gamma, dense)


def _confirm_held(item: VerifyRound, accepted: int) -> tuple[int, Proposal | None, list[int]]:
    """Remove rejected held tokens from the session; return how many are confirmed, and the proposal and the proposed
    tokens behind them, none if a held token was rejected.
    """
    confirmed = min(accepted, item.held)
    if confirmed == item.held:
        return confirmed, item.proposal, item.proposed
    del item.session.tokens[len(item.session.tokens) - item.held + confirmed :]
    return confirmed, None, []


def _figures(
    item: VerifyRound,
    output: SequenceOutput,
    read: tuple[int, int],
    proposal: Proposal | None,
    seconds: float,
    divergence: np.ndarray | None,
) -> RoundFigures:
    """Return a round's figures.

    read: (layer, KV head, token) triples read, and all of them. seconds: of the step. divergence: of the verdict's
    tokens (SequenceOutput); None: it is not audited.
    """
    stats, audit = item.session.stats, item.session.reading.audit
    variation, nats, same = (0.0, 0.0, 0) if divergence is None else divergence.sum(0).tolist()
    return RoundFigures(
        kv_tokens_read=read[0],
        kv_tokens_total=read[1],
        kv_tokens_fetched=output.tokens_fetched,
        queue_seconds=stats.queue_seconds,
        preemptions=stats.preemptions,
        announced_bytes=stats.announced_bytes,
        stale_rounds=stats.stale_rounds,
        prefill_seconds=stats.prefill_seconds,
        wait_seconds=item.wait_seconds,
        draft_seconds=proposal.draft_seconds if proposal is not None else 0.0,
        verify_seconds=seconds,
        audited_tokens=0 if divergence is None else len(divergence),
        total_variation=variation,
        kl_divergence=nats,
        same_greedy=round(same),
        rounds_made_exact=int(audit is not None and audit.is_exact),
    )


def cut_at_end(tokens: list[int], room: int, stop_token_ids: frozenset[int]) -> tuple[list[int], FinishReason]:
    """Return the tokens up to and with the first stop token, `room` tokens at most, and why they end, if they do."""
    if not stop_token_ids.isdisjoint(tokens[:room]):
        end = next(i for i, token in enumerate(tokens) if token in stop_token_ids)
        return tokens[: end + 1], FinishReason.STOP
    if len(tokens) >= room:
        return tokens[:room], FinishReason.LENGTH
    return tokens, FinishReason.NONE


def _tokens_read(item: VerifyRound, length: int, plan: Plan, kv: KVCache) -> tuple[int, int]:
    """Return how many (layer, KV head, token) triples a round over `length` tokens read, and how many there were.

    A round in the pass that reads the end of its prompt counts as part of the prompt: it read nothing of its own.
    """
    session = item.session
    if item.input.ends_prompt:
        return 0, 0
    if session.reading.reader is not None:
        read, total = session.reading.reader.tokens_read
        return round(read), total
    blocks = plan.num_blocks(length)  # whole blocks, as a sparse read counts them
    everything = kv.num_layers * kv.all_kv_heads * blocks * plan.block_size
    return everything, everything
