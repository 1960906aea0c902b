"""What a verdict does to a draft's session: tokens are committed, guesses that failed are taken back."""

from collections import Counter

from draft_service.sessions import DraftSession
from draft_service.steps import send_round
from specahead.engine.kv.cache import KVCache
from specahead.wire.messages import Resync, Verdict

_MOST_EARLY = 64  # verdicts that a session holds back


def receive_verdict(session: DraftSession, verdict: Verdict, kv: KVCache, counters: Counter[str]) -> None:
    """Apply a verdict and those that waited for it, in the order of their rounds; hold back one that is early.

    Asks for the session to be begun anew (Resync) if the verdict does not continue its tokens or too many are early.
    """
    if verdict.at.round <= session.round:
        counters["repeated_verdicts"] += 1
        return
    session.early_verdicts[verdict.at.round - 1] = verdict
    if len(session.early_verdicts) > _MOST_EARLY:
        session.peer.send(Resync(session.id))
        session.early_verdicts.clear()
    while (ready := session.early_verdicts.pop(session.round, None)) is not None:
        try:
            _apply(session, ready, kv, counters)
        except ValueError:
            counters["resyncs"] += 1
            session.peer.send(Resync(session.id))
            return


def _apply(session: DraftSession, verdict: Verdict, kv: KVCache, counters: Counter[str]) -> None:
    epoch, ahead = session.epoch, session.ahead
    met = session.apply(verdict, kv)
    if ahead is not None:
        counters["verdicts_ahead"] += 1
        counters["verdicts_met"] += met
    if met and session.epoch != epoch:
        send_round(session, counters)
    # A round behind a step that accepts nothing writes the KV of the last committed token once more.
    kv.index_prefix(session.kv, session.tokens, max(0, session.tokens_in_place - 1))
