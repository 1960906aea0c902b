"""Which parts of prompts a step reads."""

from collections.abc import Sequence

from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.step_loop import oldest_first, share_prefill
from target_service.session import TargetSession

LEAST_PART = 4  # a step reads a fourth of a chunk at least, where there is as much to read
BESIDE_ROUNDS = 2  # and half of a chunk at most, where sessions wait for their next rounds meanwhile
SCORED_ROWS = 256  # tokens of prompts whose log probabilities are asked for, that a step reads


def share_prompts(
    sessions: Sequence[TargetSession], chunk: int, beside_rounds: bool, number: int
) -> list[tuple[TargetSession, int]]:
    """Return how many tokens of its prompt each session reads in a step, for those that read any, in order of their
    arrival. chunk: tokens of all of them together, at most. beside_rounds: whether the step has rounds as well. number:
    of the step among those that read prompts.
    """
    starts, readable = [session.kv.length for session in sessions], _readable(sessions)
    first = readable[:1] if oldest_first(number) else readable
    shares = share_prefill(starts, readable, tokens_of_step(first, chunk, beside_rounds), number)
    return [(session, share) for session, share in zip(sessions, shares, strict=True) if share]


def tokens_of_step(remaining: Sequence[int], chunk: int, beside_rounds: bool) -> int:
    """Return how many tokens of prompts a step reads. remaining: the tokens left of each prompt that may come first.

    A first token comes when the step has ended that reads the end of its prompt. So a step in which a short prompt
    ends reads little beside it, and short prompts that have come together end one after another.
    """
    least, most = chunk // LEAST_PART, chunk // BESIDE_ROUNDS if beside_rounds else chunk
    return least if min(remaining, default=chunk) <= least else most


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
