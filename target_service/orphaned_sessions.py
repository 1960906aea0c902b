"""Sessions whose orchestrator was lost. Their commits are kept for a while, so that a client can continue through
another orchestrator, by the same request under the same name and with the same key.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from specahead.wire.messages import At, Commit, FinishReason, Open
from specahead.wire.session_names import name_of_client

MOST_LEFT = 1024
_FIELDS = tuple(each.name for each in fields(Commit))
_LISTS = "tokens", "logprobs", "prompt_logprobs", "screening_drafted", "screening_accepted"


def _pack(commit: Commit) -> tuple[Any, ...]:
    """Return a commit's values as numbers and tuples, which the garbage collector skips: there is one commit for each
    round that is kept.
    """
    values = dict(vars(commit))
    values["at"], values["finish_reason"] = tuple(commit.at), int(commit.finish_reason)
    for name in _LISTS:
        values[name] = tuple(values[name])
    return tuple(values[name] for name in _FIELDS)


def _unpack(packed: tuple[Any, ...]) -> Commit:
    values = dict(zip(_FIELDS, packed, strict=True))
    values["at"], values["finish_reason"] = At(*values["at"]), FinishReason(values["finish_reason"])
    return Commit(**values | {name: list(values[name]) for name in _LISTS})


@dataclass
class Written:
    """The commits of a session that were sent to the orchestrator that opened it, and to earlier ones."""

    request: Open
    """The request that opened it."""
    has_ended: bool = False
    """Whether the last commit ends the session."""
    packed: list[tuple[Any, ...]] = field(default_factory=list)
    """The commits, packed by `_pack`."""
    repeats: int = 0
    """How many commits were sent to an earlier orchestrator and not yet to this one."""

    def add(self, commit: Commit) -> None:
        """Record a commit that is sent, unless it was sent to an earlier orchestrator."""
        if self.repeats:
            self.repeats -= 1
            return
        self.packed.append(_pack(commit))
        self.has_ended = commit.finish_reason is not FinishReason.NONE

    @property
    def commits(self) -> list[Commit]:
        """All commits that were sent."""
        return list(map(_unpack, self.packed))

    def follows(self, request: Open) -> bool:
        """Return whether another request asks for the same; its seed may differ."""
        return _asked(self.request) == _asked(request)

    def taken_up_by(self, request: Open) -> "Written":
        """Return the record for the next orchestrator, which continues the session by `request`.

        It keeps all tokens behind the prompt and the seed of the first attempt, however often orchestrators are lost,
        since the client may hold any of these tokens.
        """
        asked, commits = self.request, self.commits
        if given := asked.tokens[asked.prompt_tokens :]:
            commits = [Commit(At(request.session, 0, 0, asked.prompt_tokens), given), *commits]
        packed = [_pack(replace(commit, at=commit.at._replace(session=request.session))) for commit in commits]
        return Written(replace(request, sampling=asked.sampling, resumed=True), self.has_ended, packed, len(packed))

    def going_on(self) -> Open:
        """Return the request that reopens the session behind its last token."""
        tokens = [*self.request.tokens, *(token for commit in self.commits for token in commit.tokens)]
        wanted = self.request.wants_prompt_logprobs and not self.packed  # they are sent with the first commit
        return replace(self.request, tokens=tokens, wants_prompt_logprobs=wanted)


def _asked(request: Open) -> Open:
    """Return what a request asks for, the same for each attempt and each orchestrator."""
    name, prompt = name_of_client(request.session), request.tokens[: request.prompt_tokens]
    sampling = replace(request.sampling, seed=0)
    return replace(request, session=name, tokens=prompt, sampling=sampling, traceparent="", resumed=False)


class LeftSessions:
    """Owns the records of orphaned sessions, and keeps each for `seconds`. A watcher gets a set, to which the clients'
    names of sessions are added that become orphans or stop being orphans."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left: dict[tuple[str, str], tuple[float, Written]] = {}  # by caller and name, the oldest first
        self._watches: list[set[str]] = []

    @property
    def names(self) -> set[str]:
        """The clients' names of the orphaned sessions."""
        return {name for _, name in self._left}

    def watch(self) -> set[str]:
        """Return a set of the present names, to which changed names are added later."""
        self._watches.append(changed := self.names)
        return changed

    def unwatch(self, changed: set[str]) -> None:
        self._watches = [each for each in self._watches if each is not changed]

    def leave(self, written: Written) -> None:
        """Keep the record of a session, unless it lacks the log probabilities of some of its tokens."""
        asked = written.request
        if asked.wants_logprobs and len(asked.tokens) > asked.prompt_tokens:
            return
        key = asked.caller, name_of_client(asked.session)
        self._forget(key)
        self._left[key] = time.monotonic() + self._seconds, written
        self._tell(key)
        if len(self._left) > MOST_LEFT:
            self._forget(next(iter(self._left)))

    def find(self, request: Open) -> Written | None:
        """Return the record that a new request continues; None if it continues none."""
        self.expire()
        _, written = self._left.get((request.caller, name_of_client(request.session)), (0.0, None))
        fresh = len(request.tokens) == request.prompt_tokens
        return written if written is not None and fresh and written.follows(request) else None

    def forget(self, request: Open) -> None:
        """Forget the record of a session that continues, or that another request replaces."""
        self._forget((request.caller, name_of_client(request.session)))

    def expire(self) -> None:
        """Forget records that are older than `seconds`."""
        now = time.monotonic()
        for key in [key for key, (until, _) in self._left.items() if until <= now]:
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        if self._left.pop(key, None) is not None:
            self._tell(key)

    def _tell(self, key: tuple[str, str]) -> None:
        for changed in self._watches:
            changed.add(key[1])


class Account:
    """The records of one orchestrator's sessions. A session that has ended is forgotten after `seconds`: by then a lost
    orchestrator has been noticed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: dict[str, Written] = {}
        self._ended: deque[tuple[float, Written]] = deque()  # until when each is kept

    def open(self, written: Written) -> None:
        """Begin the record of a session, or continue one."""
        self._open[written.request.session] = written

    def caller_of(self, session: str) -> str:
        """Return the name of the key that an open session's request came with; empty if the session is not open."""
        written = self._open.get(session)
        return "" if written is None else written.request.caller

    def __contains__(self, session: str) -> bool:
        return session in self._open

    def write(self, commit: Commit) -> None:
        """Record a commit that is sent."""
        written = self._open.get(commit.at.session)
        if written is not None:
            written.add(commit)
            if commit.finish_reason is not FinishReason.NONE:
                self._ended.append((time.monotonic() + self._seconds, self._open.pop(commit.at.session)))
        while self._ended and self._ended[0][0] <= time.monotonic():
            self._ended.popleft()

    def close(self, session: str) -> None:
        """Forget a session."""
        self._open.pop(session, None)

    def __iter__(self) -> Iterator[Written]:
        yield from self._open.values()
        yield from (written for _, written in self._ended)
