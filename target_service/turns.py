"""When the next turn of a conversation joins the rounds of the sessions that generate.

Turns that join together make their rounds together and end together. So their clients pause together, while the device
has nothing to do, and send their next turns together, of which each waits until those before it are read. Turns that
join one after another come apart: their prompts are read beside rounds of others, at once.
"""

from collections.abc import Iterable

from target_service.session import TargetSession

READ_MEANWHILE = 80  # tokens of a prompt that a step reads in the time in which a session generates one token


def is_later_turn(session: TargetSession) -> bool:
    """Return whether most of a session's prompt was in the KV when it came, as if a conversation goes on."""
    return 2 * session.pace.prompt_tokens < session.asked.prompt_tokens


def may_join(session: TargetSession, generating: Iterable[TargetSession]) -> bool:
    """Return whether a later turn whose prompt is read may join the rounds of these sessions: each of them has
    generated as many tokens as sessions do while a prompt like its own is read.
    """
    lead = session.pace.prompt_tokens / READ_MEANWHILE
    return all(len(other.tokens) - other.asked.prompt_tokens >= lead for other in generating)
