"""Which parts of prompts a step reads."""

from collections.abc import Sequence

from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.step_loop import share_prefill
from target_service.session import TargetSession

LEAST_PART = 4  # a step reads a fourth of a chunk at least, where there is as much to read
SCORED_ROWS = 256  # tokens of prompts whose log probabilities are asked for, that a step reads


def share_prompts(sessions: Sequence[TargetSession], chunk: int) -> list[tuple[TargetSession, int]]:
    """Return how many tokens of its prompt each session reads in a step, for those that read any, in order of their
    arrival. chunk: tokens of all of them together, at most.
    """
    starts, readable = [session.kv.length for session in sessions], _readable(sessions)
    shares = share_prefill(starts, readable, tokens_of_step(readable, chunk))
    return [(session, share) for session, share in zip(sessions, shares, strict=True) if share]


def tokens_of_step(remaining: Sequence[int], chunk: int) -> int:
    """Return how many tokens of prompts a step reads, of prompts that have so many tokens left each.

    Where short prompts end in it, it reads as many tokens of others as of these, and no whole chunk: the first tokens
    of the short ones come when the step has ended. So the oldest prompt has half of each step.
    """
    ending, half = 0, chunk - chunk // 2
    for tokens in sorted(remaining):
        if ending + tokens > half:
            break
        ending += tokens
    return min(chunk, max(2 * ending, chunk // LEAST_PART)) if ending else chunk


def is_followed_by_round(session: TargetSession, share: int, deterministic: bool) -> bool:
    """Return whether a session's round follows in the pass that reads `share` tokens of its prompt: they are all that
    is left of it, and the last token's logits are those of a step. deterministic: as in `plan_reading`.
    """
    is_ready = session.asked.grammar is None or session.asked.grammar.ready
    is_last = share == session.unread and not session.holds
    return is_last and is_ready and not deterministic and session.prompt_logprobs is None


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


def plan_reading(session: TargetSession, share: int, round_tokens: int, deterministic: bool) -> SequenceInput:
    """Return a part of the committed tokens without KV: up to `share` of them, as a prompt.

    deterministic: whether KV has to be that of the first time also where it is read again. Then tokens that were
    generated run in rounds again, as if they were proposed.
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
