"""Which sessions are drafted for: KV room is promised for the whole length of each, and the others wait their turn."""

from collections import Counter, deque

from config import DraftSettings
from draft_service.sessions import DraftSession, TargetPeer
from engine.grammars import Grammars
from engine.kv.cache import KVCache
from engine.kv.pages import pages_for
from wire.messages import Begin, Decline, Resync


class Admission:
    """Begins and drops sessions. Owns `reserved`, the KV pages promised to them, and `waiting`, those without room."""

    def __init__(
        self, kv: KVCache, settings: DraftSettings, counters: Counter[str], grammars: Grammars | None = None
    ) -> None:
        self._kv, self._settings, self._counters, self._grammars = kv, settings, counters, grammars
        self.reserved = 0
        self.waiting: deque[tuple[TargetPeer, str]] = deque()

    def begin(self, peer: TargetPeer, begin: Begin) -> None:
        """Begin a session, or begin it anew where `begin` says; decline it if there is no room."""
        name = begin.at.session
        if name in peer.ended:  # a name used again; or a late repeat, which the target ends at our first word
            peer.ended.remove(name)
        known = peer.sessions.get(name)
        if known is not None:
            if begin.at.epoch <= known.epoch:  # the target begins a session anew in a later epoch only
                self._counters["stale_frames"] += 1
                return
            self.drop(known)
        self._forget(peer, name)
        if begin.max_length > self._settings.max_context:
            reads = self._settings.max_context
            self._decline_for_good(peer, name, f"{begin.max_length} tokens, the draft model reads {reads}")
            return
        if begin.grammar and self._grammars is None:
            self._decline_for_good(peer, name, "this draft follows no grammars")
            return
        pages = self._pages(begin.max_length)
        if self.reserved + pages > self._kv.pool.num_pages:
            self._counters["declined_sessions"] += 1
            peer.send(Decline(name, "no room"))
            self.waiting.append((peer, name))
            return
        self.reserved += pages
        grammar = None
        if begin.grammar and self._grammars is not None:
            grammar = self._grammars.start(begin.grammar, begin.tokens, begin.prompt_tokens)
        session = DraftSession.from_begin(peer, begin, self._settings.gamma, grammar)
        self._kv.reuse_prefix(session.kv, session.tokens[:-1])
        peer.sessions[name] = session

    def drop(self, session: DraftSession) -> None:
        """Release all that a session holds, and ask for the session that has waited longest for room."""
        self._kv.release(session.kv)
        self.reserved -= self._pages(session.max_length)
        del session.peer.sessions[session.id]
        if self.waiting:
            peer, name = self.waiting.popleft()
            peer.send(Resync(name))  # it went on without us: where does it stand now?

    def end(self, peer: TargetPeer, name: str) -> None:
        """Drop a session that is over, if it is here, and forget it if it waits."""
        peer.ended.append(name)
        self._forget(peer, name)
        if name in peer.sessions:
            self.drop(peer.sessions[name])

    def fail(self, session: DraftSession, reason: str) -> None:
        """Drop a session whose step failed: its target decodes it plainly from now on."""
        self._decline_for_good(session.peer, session.id, reason)
        self.drop(session)

    def detach(self, peer: TargetPeer) -> None:
        """Drop and forget all sessions of a target whose stream broke."""
        self.waiting = deque(item for item in self.waiting if item[0] is not peer)
        for session in list(peer.sessions.values()):
            self.drop(session)

    def expects_verdicts(self, peer: TargetPeer, name: str) -> bool:
        """Return whether verdicts on a session that is not drafted for are to be expected: it ended, or it waits."""
        return name in peer.ended or (peer, name) in self.waiting

    def _decline_for_good(self, peer: TargetPeer, name: str, reason: str) -> None:
        peer.send(Decline(name, reason))
        peer.ended.append(name)

    def _forget(self, peer: TargetPeer, name: str) -> None:
        self.waiting = deque(item for item in self.waiting if item != (peer, name))

    def _pages(self, max_length: int) -> int:
        """Return the pages that a session may come to hold: its tokens, a round, and the branches drafted behind it."""
        return pages_for(max_length + (1 + self._settings.branches) * (self._settings.gamma + 1))
