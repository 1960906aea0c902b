"""Which sessions are open: who waits for room, who runs, and whose pages are still to be released.

A session takes pages as its tokens come. It starts to run when its tokens and a few more fit. When pages run out, the
session that started last gives way to the others, and continues before any that has not run yet: the oldest always
runs, so that all come to their end. Peers share the places and the queue, the streams of a peer share its part, and the
clients of a stream its places, so that many sessions of one keep nobody out. `emit` identifies a session's stream.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import takewhile

from specahead.engine.kv.pages import KEPT_SHARE, PAGE_SIZE
from specahead.engine.kv.prefix_index import prefix_hashes
from specahead.wire.errors import InvalidArgument, ResourceExhausted
from specahead.wire.messages import Open, Report, ServedEvent
from target_service.opening import SessionMaker, pages_of_round
from target_service.session import TargetSession
from target_service.target import Target


class Admission:
    """Owns the table of sessions, and decides who runs."""

    def __init__(self, target: Target, maker: SessionMaker) -> None:
        self.running: dict[str, TargetSession] = {}  # by name, the oldest first
        self.preempted: deque[TargetSession] = deque()  # gave way, the oldest first; all that run are older
        self.queue: deque[TargetSession] = deque()  # have not run yet
        self.draining = False  # whether orchestrators are to open no more sessions
        self._maker = maker
        self._kv, self._deterministic = target.runner.kv, target.runner.deterministic
        self._settings, self._counters = target.settings, target.counters
        self._closed: list[TargetSession] = []  # their pages may still be written by a running step
        self._peers: dict[Callable[[ServedEvent], None], str] = {}  # by the emit of each open stream
        self._first_epoch = 0  # of later sessions: higher than any before, so that a name can be used again

    def everyone(self) -> Iterator[TargetSession]:
        """Yield all open sessions: running and waiting ones."""
        yield from self.running.values()
        yield from self.preempted
        yield from self.queue

    def is_open(self, session: TargetSession) -> bool:
        """Return whether a running session is still the one of its name; it may have ended during a step."""
        return self.running.get(session.id) is session

    # Opening.

    @contextlib.contextmanager
    def shared(self, emit: Callable[[ServedEvent], None], peer: str) -> Iterator[None]:
        """Let the stream that `emit` belongs to have a part of what its peer has, while the context lasts."""
        self._peers[emit] = peer
        try:
            yield
        finally:
            del self._peers[emit]

    def _peer_of(self, session: TargetSession) -> str:
        return self._peers.get(session.asked.emit, "")

    def open(self, request: Open, emit: Callable[[ServedEvent], None]) -> None:
        """Queue a session.

        Where all places of the queue are taken, the peer that has the most of them gives one to a peer that has fewer,
        and among the streams of one peer likewise. A session that was accepted before always waits, and is never asked
        to give its place. Raises InvalidArgument if the session can never run, ResourceExhausted if there is no room
        for it.
        """
        if any(session.id == request.session for session in self.everyone()):
            raise InvalidArgument(f"session {request.session} is open already")
        self._maker.check(request)
        if not request.resumed:
            self._make_place(len(request.tokens), emit)
        self.queue.append(self._maker.make(request, emit, time.monotonic()))

    def _make_place(self, tokens: int, emit: Callable[[ServedEvent], None]) -> None:
        """Raise ResourceExhausted if a session of `tokens` tokens can neither run at once nor be queued."""
        most, before, evicted = self._settings.max_queued, self.queue.copy(), list[TargetSession]()
        while (queued := self._queued_with(tokens)) > most:
            session = self._next_to_evict(emit)
            if session is None:
                self.queue = before
                raise ResourceExhausted(
                    f"no place is free, and {queued + len(evicted) - 1} sessions are queued already of at most {most}; "
                    "try again later"
                )
            self.queue.remove(session)
            evicted.append(session)
        for session in evicted:
            session.fail(ResourceExhausted("its place in the queue is needed for another client; try again later"))

    def _next_to_evict(self, emit: Callable[[ServedEvent], None]) -> TargetSession | None:
        """Return the queued session that gives its place to a new one of the stream of `emit`; None if nobody has more
        than a fair share. Sessions that were accepted before keep their places and do not count.
        """
        peer, waiting = self._peers.get(emit, ""), self._evictable()
        peers = Counter(map(self._peer_of, waiting))
        greedy = max(peers, key=peers.__getitem__, default=peer)
        if peers[greedy] <= peers[peer] + 1:
            greedy = peer
        streams = Counter(session.asked.emit for session in waiting if self._peer_of(session) == greedy)
        held = max(streams.values(), default=0)
        if greedy == peer and held <= streams[emit] + 1:
            return None
        return next(session for session in reversed(waiting) if streams[session.asked.emit] == held)

    def _evictable(self) -> list[TargetSession]:
        """Return the queued sessions that may have to give their places to others."""
        return [session for session in self.queue if not session.asked.resumed]

    def _queued_with(self, tokens: int) -> int:
        """Return how many sessions the next step would leave in the queue if it also held one of `tokens` tokens."""
        waiting, running, free = self._after_next_step()
        if not waiting and self._may_run(self._need(tokens), running, free):
            return 0
        return min(waiting, len(self.queue)) + 1

    def _after_next_step(self) -> tuple[int, int, int]:
        """Return how many sessions the next step would leave waiting, how many run then, and the pages free then."""
        references = self._kv.pool.references
        leaving = sum(references[page] == 1 for session in self._closed for page in session.kv.pages)
        running, free = len(self.running), self._free_pages() + leaving
        for count, session in enumerate((*self.preempted, *self.queue)):
            need = self._need(len(session.tokens))
            if not self._may_run(need, running, free):
                return len(self.preempted) + len(self.queue) - count, running, free
            running, free = running + 1, free - need
        return 0, running, free

    def room(self, emit: Callable[[ServedEvent], None]) -> Report:
        """Return a report that says how many more sessions of who owns `emit` would run at once, or wait."""
        waiting, running, free = self._after_next_step()
        peer = self._peers.get(emit, "")
        peers = Counter(map(self._peer_of, evictable := self._evictable()))
        streams = Counter(session.asked.emit for session in evictable if self._peer_of(session) == peer)
        shares = (peers, peers[peer]), (streams, streams[emit])
        taken_over = max((max(counts.values(), default=0) - own) // 2 for counts, own in shares)  # see _next_to_evict
        # Fewer than 0 where many were accepted before.
        places = self._settings.max_queued - min(waiting, len(self.queue))
        return Report(
            sessions=len(self.running) + len(self.preempted) + len(self.queue),
            waiting=waiting,
            free_places=max(0, self._settings.max_sessions - running),
            free_kv_pages=max(0, free - self._kept(running)),
            queue_places=max(0, places, taken_over + min(0, places)),
            unread_tokens=self._unread_tokens,
            queue_seconds=time.monotonic() - self._next().queued_at if waiting else 0.0,
            kv_pages=self._kv.pool.num_pages,
            draining=self.draining,
        )

    @property
    def _unread_tokens(self) -> int:
        return sum(max(0, session.unread) for session in self.everyone()) - sum(map(self._found, self.queue))

    def _found(self, session: TargetSession) -> int:
        """Return how many tokens of a queued session will be found in the KV, as it was at the session's first report.
        Counted as unread, they would send turns of other conversations to targets without their KV.
        """
        if session.prompt_logprobs is not None:
            return 0
        if not session.stats.cached_tokens:
            held = self._kv.pool.prefixes.hashes
            pages = sum(1 for _ in takewhile(held.__contains__, prefix_hashes(session.tokens[:-1])))
            session.stats.cached_tokens = pages * PAGE_SIZE
        return session.stats.cached_tokens

    # Room.

    def _need(self, tokens: int) -> int:
        return pages_of_round(tokens, self._settings)

    def _free_pages(self) -> int:
        """Return how many pages nobody holds and none that runs needs for the tokens that it has and its next round."""
        running = self.running.values()
        missing = sum(max(0, self._need(len(session.tokens)) - len(session.kv.pages)) for session in running)
        return self._kv.pool.available - missing

    def _may_run(self, need: int, running: int, free: int) -> bool:
        """Return whether one more session, which needs `need` pages, may run beside `running` others, of `free` pages.

        Some of the free pages are kept, so that it does not have to give way at once. By itself it always fits.
        """
        places = running < self._settings.max_sessions
        return running == 0 or (places and need + self._kept(running) <= free)

    def _kept(self, running: int) -> int:
        """Return how many pages stay free when a session begins to run beside `running` others; 0 if it is alone."""
        return max(running, int(KEPT_SHARE * self._kv.pool.num_pages)) if running else 0

    # Between steps.

    @property
    def admits(self) -> bool:
        """Whether a session that waits may run."""
        return bool(self.preempted or self.queue) and self._has_room_for(self._next())

    def _has_room_for(self, session: TargetSession) -> bool:
        return self._may_run(self._need(len(session.tokens)), len(self.running), self._free_pages())

    def admit(self) -> list[TargetSession]:
        """Let sessions run while there is room; return the ones that start or continue.

        Sessions that gave way come first. Then follows the peer with the fewest running sessions, of its streams the
        one with the fewest, of that stream's clients the one with the fewest, and of its sessions the first. A session
        takes over indexed pages that hold a prefix of its tokens.
        """
        admitted = []
        while self.preempted or self.queue:
            session = self._next()
            if not self._has_room_for(session):
                break
            self._start(session)
            admitted.append(session)
        return admitted

    def _next(self) -> TargetSession:
        """Return the session that is the next to run. One must be waiting."""
        if self.preempted:
            return self.preempted[0]
        peers = Counter(map(self._peer_of, self.running.values()))
        streams = Counter(session.asked.emit for session in self.running.values())
        clients = Counter((session.asked.emit, session.asked.client) for session in self.running.values())

        def shares(waiting: TargetSession) -> tuple[int, int, int]:
            own = waiting.asked.emit, waiting.asked.client
            return peers[self._peer_of(waiting)], streams[waiting.asked.emit], clients[own]

        return min(self.queue, key=shares)  # the first of several

    def _start(self, session: TargetSession) -> None:
        """Let a session run that waits for room."""
        # A deterministic runner's KV is the same for all who read a prompt, not for those who generated it.
        known = session.asked.prompt_tokens if self._deterministic else len(session.tokens)
        if session.prompt_logprobs is None:  # else the whole prompt is read
            self._kv.reuse_prefix(session.kv, session.tokens[: known - 1])
        if self.preempted:
            self.preempted.remove(session)
        else:
            self.queue.remove(session)
            session.epoch = self._first_epoch
            session.stats.cached_tokens = session.kv.length
            self._counters["opened_sessions"] += 1
        self.running[session.id] = session
        session.stats.queue_seconds += time.monotonic() - session.queued_at

    def preempt_youngest(self) -> None:
        """Have the session that started last give its room to the others. No step may be running."""
        _, session = self.running.popitem()
        self._kv.release(session.kv)
        session.give_way()
        self.preempted.appendleft(session)
        self._counters["preemptions"] += 1

    def release_closed(self) -> None:
        """Release the pages of sessions that have ended. No step may be running but an asynchronous one: its
        writes after their text come before those of any later step.
        """
        for session in self._closed:
            self._kv.release(session.kv)
        self._closed.clear()

    # Ending.

    def close(self, session: TargetSession) -> None:
        """End a session that runs or waits. Its name is free at once; its pages are when no step runs."""
        self._first_epoch = max(self._first_epoch, session.epoch + 1)
        if self.is_open(session):
            self._closed.append(session)
            del self.running[session.id]
        else:
            (self.preempted if session in self.preempted else self.queue).remove(session)
