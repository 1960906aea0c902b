"""Sessions whose orchestrator was lost. Their commits are kept for a while, so that a client can continue through
another orchestrator, by the same request under the same name and with the same key.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from specahead.wire.convert import commit_from_bytes, commit_to_bytes
from specahead.wire.messages import At, Commit, FinishReason, Open
from specahead.wire.session_names import name_of_client

MOST_ORPHANS = 1024


@dataclass
class SessionRecord:
    """The commits of a session that were sent to the orchestrator that opened it, and to earlier ones."""

    request: Open
    """The request that opened it."""
    has_ended: bool = False
    """Whether the last commit ends the session."""
    packed: list[bytes] = field(default_factory=list)
    """The commits as they are sent: one a round, as bytes, which the garbage collector does not scan."""
    repeats: int = 0
    """How many commits were sent to an earlier orchestrator and not yet to this one."""

    def add(self, commit: Commit, packed: bytes) -> None:
        """Record a commit that is sent as `packed`, unless it was sent to an earlier orchestrator."""
        if self.repeats:
            self.repeats -= 1
            return
        self.packed.append(packed)
        self.has_ended = commit.finish_reason is not FinishReason.NONE

    @property
    def commits(self) -> list[Commit]:
        """All commits that were sent."""
        return list(map(commit_from_bytes, self.packed))

    def follows(self, request: Open) -> bool:
        """Return whether another request asks for the same; its seed may differ."""
        return _asked(self.request) == _asked(request)

    def continued_by(self, request: Open) -> "SessionRecord":
        """Return the record for the next orchestrator, which continues the session by `request`.

        It keeps all tokens after the prompt and the seed of the first attempt, however often orchestrators are lost,
        since the client may hold any of these tokens.
        """
        asked, commits = self.request, self.commits
        if given := asked.tokens[asked.prompt_tokens :]:
            commits = [Commit(At(request.session, 0, 0, asked.prompt_tokens), given), *commits]
        packed = [
            commit_to_bytes(replace(commit, at=commit.at._replace(session=request.session))) for commit in commits
        ]
        return SessionRecord(
            replace(request, sampling=asked.sampling, resumed=True), self.has_ended, packed, len(packed)
        )

    def reopening(self) -> Open:
        """Return the request that reopens the session after its last token."""
        tokens = [*self.request.tokens, *(token for commit in self.commits for token in commit.tokens)]
        wanted = self.request.wants_prompt_logprobs and not self.packed  # they are sent with the first commit
        return replace(self.request, tokens=tokens, wants_prompt_logprobs=wanted)


def _asked(request: Open) -> Open:
    """Return what a request asks for, the same for each attempt and each orchestrator."""
    name, prompt = name_of_client(request.session), request.tokens[: request.prompt_tokens]
    sampling = replace(request.sampling, seed=0)
    return replace(request, session=name, tokens=prompt, sampling=sampling, resumed=False)


class OrphanedSessions:
    """Owns the records of orphaned sessions, and keeps each for `seconds`. A watcher gets a set, to which the clients'
    names of sessions are added that become orphans or stop being orphans."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._orphans: dict[tuple[str, str], tuple[float, SessionRecord]] = {}  # by caller and name, the oldest first
        self._watches: list[set[str]] = []

    @property
    def names(self) -> set[str]:
        """The clients' names of the orphaned sessions."""
        return {name for _, name in self._orphans}

    def watch(self) -> set[str]:
        """Return a set of the present names, to which changed names are added later."""
        self._watches.append(changed := self.names)
        return changed

    def unwatch(self, changed: set[str]) -> None:
        self._watches = [each for each in self._watches if each is not changed]

    def leave(self, record: SessionRecord) -> None:
        """Keep the record of a session, unless it lacks the log probabilities of some of its tokens."""
        asked = record.request
        if asked.wants_logprobs and len(asked.tokens) > asked.prompt_tokens:
            return
        key = asked.caller, name_of_client(asked.session)
        self._forget(key)
        self._orphans[key] = time.monotonic() + self._seconds, record
        self._tell(key)
        if len(self._orphans) > MOST_ORPHANS:
            self._forget(next(iter(self._orphans)))

    def find(self, request: Open) -> SessionRecord | None:
        """Return the record that a new request continues; None if it continues none."""
        self.expire()
        _, record = self._orphans.get((request.caller, name_of_client(request.session)), (0.0, None))
        fresh = len(request.tokens) == request.prompt_tokens
        return record if record is not None and fresh and record.follows(request) else None

    def forget(self, request: Open) -> None:
        """Forget the record of a session that continues, or that another request replaces."""
        self._forget((request.caller, name_of_client(request.session)))

    def expire(self) -> None:
        """Forget records that are older than `seconds`."""
        now = time.monotonic()
        for key in [key for key, (until, _) in self._orphans.items() if until <= now]:
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        if self._orphans.pop(key, None) is not None:
            self._tell(key)

    def _tell(self, key: tuple[str, str]) -> None:
        for changed in self._watches:
            changed.add(key[1])


class StreamRecords:
    """The records of one orchestrator's sessions. A session that has ended is forgotten after `seconds`: by then a lost
    orchestrator has been noticed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: dict[str, SessionRecord] = {}
        self._ended: deque[tuple[float, SessionRecord]] = deque()  # until when each is kept

    def open(self, record: SessionRecord) -> None:
        """Begin the record of a session, or continue one."""
        self._open[record.request.session] = record

    def __contains__(self, session: str) -> bool:
        return session in self._open

    def write(self, commit: Commit, packed: bytes) -> None:
        """Record a commit that is sent as `packed`."""
        record = self._open.get(commit.at.session)
        if record is not None:
            record.add(commit, packed)
            if commit.finish_reason is not FinishReason.NONE:
                self._ended.append((time.monotonic() + self._seconds, self._open.pop(commit.at.session)))
        while self._ended and self._ended[0][0] <= time.monotonic():
            self._ended.popleft()

    def close(self, session: str) -> None:
        """Forget a session."""
        self._open.pop(session, None)

    def __iter__(self) -> Iterator[SessionRecord]:
        yield from self._open.values()
        yield from (record for _, record in self._ended)
