"""Which sessions are drafted for.

Their KV grows as tokens come. When pages run out, one session gives way: its target decodes it plainly, and it waits
with the sessions that found no room at all. Targets share the room: the youngest session of the target with the most
sessions here gives way, and the session that has waited longest of the target with the fewest comes next.
"""

from collections import Counter, deque
from collections.abc import Callable

from draft_service.sessions import DraftSession, TargetPeer
from specahead.config import DraftSettings
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from specahead.engine.sampling.grammars import Grammars
from specahead.wire.messages import Begin, Decline, Resync

KEPT_CONTEXTS = 2  # times draft_context by which a text that grows is read from further back than a new one


class Admission:
    """Begins and drops sessions."""

    def __init__(
        self, kv: KVCache, settings: DraftSettings, counters: Counter[str], grammars: Grammars | None = None
    ) -> None:
        self._kv, self._settings, self._counters = kv, settings, counters
        self.grammars = grammars
        """Compiles the grammars of sessions; None: sessions with one are declined."""
        self.sessions: list[DraftSession] = []
        """Sessions that are drafted for, oldest first."""
        self.kv_of_target: Callable[[str], SequenceKV | None] | None = None
        """Returns the target's KV of a session by its name, where the draft is a head, which reads its states; None for
        a session that has ended."""
        self.waiting: deque[tuple[TargetPeer, str]] = deque()
        """Names of sessions without room, by target."""

    def begin(self, peer: TargetPeer, begin: Begin) -> None:
        """Begin a session, anew if it is known; decline it if there is no room."""
        name = begin.at.session
        if name in peer.ended:  # the name is used again; or a late repeat, which the target ends at our first message
            peer.ended.remove(name)
        known = peer.sessions.get(name)
        if known is not None:
            if begin.at.epoch <= known.at.epoch:  # the target begins a session anew in a later epoch only
                self._counters["stale_frames"] += 1
                return
            self.drop(known)
        self._forget(peer, name)
        skipped = self._skipped(begin)
        if reason := self._why_never(begin, skipped):
            self._decline_for_good(peer, name, reason)
        elif not self._has_room(len(begin.tokens) - skipped):
            self._decline(peer, name)
            self.waiting.append((peer, name))
        else:
            self._start(peer, begin, skipped)

    def _why_never(self, begin: Begin, skipped: int) -> str:
        """Return why a session can never be drafted for; empty if it can. skipped: tokens that the draft leaves out."""
        length, reads = begin.max_length - skipped, self._settings.max_context
        if length > reads:
            return f"{length} tokens, the draft model reads {reads}"
        if begin.grammar and self.grammars is None:
            return "this draft follows no grammars"
        return "" if len(begin.tokens) > skipped else "a head drafts for texts of two tokens or more"

    def _start(self, peer: TargetPeer, begin: Begin, skipped: int) -> None:
        """Start to draft for a session, with the KV that there is of its text."""
        grammar = None
        if begin.grammar and self.grammars is not None:
            grammar = self.grammars.start(begin.grammar, begin.tokens[skipped:], begin.prompt_tokens - skipped)
        session = DraftSession.from_begin(peer, begin, self._settings.most_drafted, grammar, skipped)
        if self.kv_of_target is not None:
            session.kv.target = self.kv_of_target(session.id)
            if session.kv.target is None:  # its End is here already
                return
        # A head's KV depends on the first token as well, in which texts that go on alike hardly ever differ.
        self._kv.reuse_prefix(session.kv, session.tokens[:-1])
        peer.sessions[session.id] = session
        self.sessions.append(session)

    def _skipped(self, begin: Begin) -> int:
        """Return how many of a session's first tokens the draft does not read: as few as for an earlier turn of the
        same text, whose KV it still has, so that a text that grows is not read anew in each draft_context.
        """
        if self.kv_of_target is not None:
            return 1  # at each position it reads the target's state there, and the token after it
        skipped = self._settings.chosen.skipped_by_draft(begin.prompt_tokens, begin.announces)
        step = self._settings.chosen.draft_context
        if not skipped:
            return 0
        least = max(0, begin.max_length - self._settings.max_context, skipped - KEPT_CONTEXTS * step)
        known = (
            at for at in range(skipped - step, least - 1, -step) if self._kv.knows(begin.tokens[at : at + PAGE_SIZE])
        )
        return next(known, skipped)

    def drop(self, session: DraftSession) -> None:
        """Release a session's KV, and ask a target for the next session that waits for room."""
        self._release(session)
        if self.waiting:
            peer, name = chosen = min(self.waiting, key=lambda waits: len(waits[0].sessions))
            self.waiting.remove(chosen)
            peer.send(Resync(name))  # it went on without us: the target's Begin says where it stands

    def preempt_youngest(self) -> None:
        """Let one session give its room to the others; it waits before all that wait already."""
        most = max(len(session.peer.sessions) for session in self.sessions)
        session = next(each for each in reversed(self.sessions) if len(each.peer.sessions) == most)
        self._decline(session.peer, session.id)
        self._release(session)
        self.waiting.appendleft((session.peer, session.id))

    def _release(self, session: DraftSession) -> None:
        self._kv.release(session.kv)
        self.sessions.remove(session)
        del session.peer.sessions[session.id]

    def _decline(self, peer: TargetPeer, name: str) -> None:
        self._counters["declined_sessions"] += 1
        peer.send(Decline(name, "no room"))

    def end(self, peer: TargetPeer, name: str) -> None:
        """Drop or forget a session that is over."""
        peer.ended.append(name)
        self._forget(peer, name)
        if name in peer.sessions:
            self.drop(peer.sessions[name])

    def fail(self, session: DraftSession, reason: str) -> None:
        """Drop a session whose step failed; its target decodes it plainly from now on."""
        self._decline_for_good(session.peer, session.id, reason)
        self.drop(session)

    def detach(self, peer: TargetPeer) -> None:
        """Drop and forget all sessions of a target whose stream broke."""
        self.waiting = deque(item for item in self.waiting if item[0] is not peer)
        for session in list(peer.sessions.values()):
            self.drop(session)

    def expects_verdicts(self, peer: TargetPeer, name: str) -> bool:
        """Return whether verdicts on a session without drafts are normal: it has ended, or it waits."""
        return name in peer.ended or (peer, name) in self.waiting

    def _decline_for_good(self, peer: TargetPeer, name: str, reason: str) -> None:
        peer.send(Decline(name, reason))
        peer.ended.append(name)

    def _forget(self, peer: TargetPeer, name: str) -> None:
        self.waiting = deque(item for item in self.waiting if item != (peer, name))

    def _has_room(self, tokens: int) -> bool:
        """Return whether a session with this many tokens finds room beside the tokens that the others have.

        One page is kept for each of these, so that none has to give way at once.
        """
        missing = sum(max(0, self._need(len(s.tokens)) - len(s.kv.pages)) for s in self.sessions)
        return self._need(tokens) + missing + len(self.sessions) <= self._kv.pool.available

    def _need(self, tokens: int) -> int:
        """Return the pages for tokens, the next round, and the outcomes that the round after it is drafted for."""
        return pages_for(tokens + (1 + max(1, self._settings.chosen.branches)) * (self._settings.most_drafted + 1))
