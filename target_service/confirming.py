"""Which rounds of a step confirm what their sessions hold, and which screen."""

from collections.abc import Collection, Iterable, Sequence

from target_service.screening import Confirms, Screening
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound


def how_each_confirms(rounds: Sequence[tuple[TargetSession, int]], away: Collection[str]) -> dict[str, Confirms]:
    """Return how each of these sessions does, by name, with so many proposed tokens: each by itself of those that are
    `away`, whose KV has partly left the GPU, and the others together. The link brings the KV of one session in the time
    that it takes for it among others, so that confirming before it must would only bring it more often.
    """
    near = [(session, proposed) for session, proposed in rounds if session.id not in away]
    confirms = dict.fromkeys((session.id for session, _ in near), how_to_confirm(near))
    far = ((session, proposed) for session, proposed in rounds if session.id in away)
    return confirms | {session.id: how_to_confirm([(session, proposed)]) for session, proposed in far}


def how_to_confirm(rounds: Iterable[tuple[TargetSession, int]]) -> Confirms:
    """Return whether one of these sessions, with so many proposed tokens each, has to confirm what it holds.

    Then all of them do, and weigh what they read if one is to that holds something, or soon may: one dense pass for
    all takes less time than passes that list everything for some of them, between which the others screen
    (docs/performance.md).
    """
    screened = [(session, session.screening, proposed) for session, proposed in rounds if session.screening is not None]
    confirm = [(session, screening) for session, screening, n in screened if is_confirmed(session, screening, n)]
    holding = any(len(session.tokens) > screening.confirmed for session, screening in confirm)
    if not holding and len(confirm) < len(screened):
        return Confirms.NO
    weighs = any(screening.is_to_weigh and (holding or n) for _, screening, n in screened)
    return Confirms.WEIGHING if weighs else Confirms.YES


def screen_lightly(rounds: list[VerifyRound], away: Collection[str] = ()) -> None:
    """Have the rounds of a step that screen run by the weights for what a later pass judges, unless others run beside
    them in one pass, by the weights of these. Rounds that read everything have a pass of their own where their sessions
    are `away`: some of their KV has left the GPU.
    """
    light = all(item.screens or item.session.id in away for item in rounds)
    for item in rounds:
        item.input.light = light and item.screens


def is_confirmed(session: TargetSession, screening: Screening, proposed: int) -> bool:
    """Return whether a round confirms what a session holds, with so many proposed tokens, and is not screened itself:
    where nothing is proposed or it is guessed, where it would hold too many tokens, where it does not know what to
    read, and where the KV of what it holds was cut already for a step that had no room.
    """
    too_many = len(session.tokens) + proposed >= screening.confirmed + screening.most
    is_cut = session.kv.length < len(session.tokens) - 1
    return not proposed or session.copies or too_many or screening.is_stale or is_cut
