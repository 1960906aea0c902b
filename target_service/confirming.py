"""Which rounds of a step confirm what their sessions hold, and which screen."""

from collections.abc import Collection, Iterable, Sequence

from target_service.screening import Confirms, Screening
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound


def how_each_confirms(rounds: Sequence[tuple[TargetSession, int]], away: Collection[str]) -> dict[str, Confirms]:
    """Decide, per session, whether its round confirms. rounds: sessions and the numbers of their proposed tokens.

    Sessions that are `away`, whose KV has partly left the GPU, decide alone, the others together: the link takes as
    long for one session's KV alone as among others, so confirming early would only fetch it more often.
    """
    near = [(session, proposed) for session, proposed in rounds if session.id not in away]
    confirms = dict.fromkeys((session.id for session, _ in near), how_to_confirm(near))
    far = ((session, proposed) for session, proposed in rounds if session.id in away)
    return confirms | {session.id: how_to_confirm([(session, proposed)]) for session, proposed in far}


def how_to_confirm(rounds: Iterable[tuple[TargetSession, int]]) -> Confirms:
    """Return whether sessions confirm the tokens that they hold: all do once one has to. rounds: the sessions and the
    numbers of their proposed tokens.

    One dense pass for all takes less time than several that list everything for some of the sessions. All weigh the KV
    that they read if one of them is due to weigh it, and holds tokens or soon may.
    """
    screened = [(session, session.screening, proposed) for session, proposed in rounds if session.screening is not None]
    confirm = [session for session, screening, n in screened if is_confirmed(session, screening, n)]
    holding = any(session.holds for session in confirm)
    if not holding and len(confirm) < len(screened):
        return Confirms.NO
    weighs = any(screening.is_to_weigh and (holding or n) for _, screening, n in screened)
    return Confirms.WEIGHING if weighs else Confirms.YES


def screen_lightly(rounds: list[VerifyRound], away: Collection[str] = ()) -> None:
    """Have the screening rounds of a step read the weights in 8 bits, unless other rounds run in the same pass. Rounds
    that read everything have a pass of their own where their sessions are `away`: some of their KV has left the GPU.
    """
    light = all(item.screens or item.session.id in away for item in rounds)
    for item in rounds:
        item.input.light = light and item.screens


def is_confirmed(session: TargetSession, screening: Screening, proposed: int) -> bool:
    """Return whether a round of `proposed` tokens has to confirm the tokens that its session holds.

    It has to if nothing is proposed or it is a guess, if the session would hold too many tokens, if its weights are too
    old to screen by, or if the KV of held tokens was cut already for a step that found no room.
    """
    too_many = len(session.tokens) + proposed >= screening.confirmed + screening.most
    is_cut = session.kv.length < len(session.tokens) - 1
    return not proposed or session.is_guessing or too_many or screening.is_stale or is_cut
