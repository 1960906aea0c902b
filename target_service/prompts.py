"""Which parts of prompts a step reads."""

from collections.abc import Sequence

from specahead.config import TargetSettings
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.step_loop import share_prefill
from target_service.session import TargetSession

SCORED_ROWS = 256  # tokens of prompts whose log probabilities are asked for, that a step reads


def plan_prompts(
    sessions: Sequence[TargetSession], settings: TargetSettings, deterministic: bool
) -> list[tuple[TargetSession, SequenceInput]]:
    """Return the parts of their prompts that sessions read in a step, in order of their arrival.

    deterministic: whether KV has to be that of the first time also where it is read again.
    """
    starts = [session.kv.length for session in sessions]
    shares = share_prefill(starts, _readable(sessions), settings.prefill_chunk)
    return [
        (session, _plan_reading(session, share, settings.widest_round, deterministic))
        for session, share in zip(sessions, shares, strict=True)
        if share
    ]


def _readable(reading: Sequence[TargetSession]) -> list[int]:
    """Return how many tokens each session may read in a step: all, but for those whose prompts are scored.

    A row of logits is large, so that all of these together have SCORED_ROWS.
    """
    rows, readable = SCORED_ROWS, []
    for session in reading:
        tokens = session.unread
        if session.prompt_logprobs is not None:
            tokens = min(tokens, rows)
            rows -= tokens
        readable.append(tokens)
    return readable


def _plan_reading(session: TargetSession, share: int, round_tokens: int, deterministic: bool) -> SequenceInput:
    """Return a part of the committed tokens without KV: up to `share` of them, as a prompt.

    Where KV has to be that of the first time, tokens that were generated run in rounds again, as if they were proposed.
    """
    start, prompt_end = session.kv.length, session.asked.prompt_tokens - 1
    if session.prompt_logprobs is not None:
        return SequenceInput(session.kv, session.tokens[start : start + share], logits="all")
    if not deterministic:
        return SequenceInput(session.kv, session.tokens[start : start + share])
    if start < prompt_end:
        return SequenceInput(session.kv, session.tokens[start : min(start + share, prompt_end)])
    first, *others = session.tokens[start : start + min(share, round_tokens)]
    drafted = Drafted(others, [], Sampling(temperature=0.0), start + 1)
    return SequenceInput(session.kv, [first, *others], logits="all", drafted=drafted)
