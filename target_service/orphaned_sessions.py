"""Sessions whose orchestrator was lost. What each has come to is kept for a while, so that its client can go on with it
through another one: by the same request, of the same name and with the same key.
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
    """Return a commit's values as numbers and tuples of them, which the garbage collector need not look at: there is
    one for each round of all that is generated.
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
    """The rounds that were told of a session to the orchestrator that opened it by `request`, and to those before it.

    has_ended: whether the last of them is the session's end. packed: the rounds, as of `_pack`. repeats: how many of
    them this orchestrator has not been told yet, since an orchestrator before it was.
    """

    request: Open
    has_ended: bool = False
    packed: list[tuple[Any, ...]] = field(default_factory=list)
    repeats: int = 0

    def add(self, commit: Commit) -> None:
        """Write down a round that is told, unless it was told to an orchestrator before."""
        if self.repeats:
            self.repeats -= 1
            return
        self.packed.append(_pack(commit))
        self.has_ended = commit.finish_reason is not FinishReason.NONE

    @property
    def commits(self) -> list[Commit]:
        """All rounds that were told."""
        return list(map(_unpack, self.packed))

    def follows(self, request: Open) -> bool:
        """Return whether another request asks for the same, whatever its seed."""
        return _asked(self.request) == _asked(request)

    def taken_up_by(self, request: Open) -> "Written":
        """Return what the next orchestrator, which asks by that request, is to be told of the session.

        All that was committed behind the prompt is kept, and the seed of the first attempt, however often an
        orchestrator is lost before it was told everything: the client may hold any of these tokens.
        """
        asked, commits = self.request, self.commits
        if given := asked.tokens[asked.prompt_tokens :]:
            commits = [Commit(At(request.session, 0, 0, asked.prompt_tokens), given), *commits]
        packed = [_pack(replace(commit, at=commit.at._replace(session=request.session))) for commit in commits]
        return Written(replace(request, sampling=asked.sampling, resumed=True), self.has_ended, packed, len(packed))

    def going_on(self) -> Open:
        """Return the request that opens the session where it stands."""
        tokens = [*self.request.tokens, *(token for commit in self.commits for token in commit.tokens)]
        wanted = self.request.wants_prompt_logprobs and not self.packed  # they are told with the first round
        return replace(self.request, tokens=tokens, wants_prompt_logprobs=wanted)


def _asked(request: Open) -> Open:
    """Return what a request asks for, whoever passes it on and whichever attempt it is."""
    name, prompt = name_of_client(request.session), request.tokens[: request.prompt_tokens]
    sampling = replace(request.sampling, seed=0)
    return replace(request, session=name, tokens=prompt, sampling=sampling, traceparent="", resumed=False)


class LeftSessions:
    """Owns what was written of sessions that nobody has any more, for `seconds`. Whoever watches gets a set, to which
    the names are added that clients have for sessions that are left or not left any more."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left: dict[tuple[str, str], tuple[float, Written]] = {}  # by caller and name, the oldest first
        self._watches: list[set[str]] = []

    @property
    def names(self) -> set[str]:
        """The names that clients have for them."""
        return {name for _, name in self._left}

    def watch(self) -> set[str]:
        """Return a set of the names, to which later changes are added."""
        self._watches.append(changed := self.names)
        return changed

    def unwatch(self, changed: set[str]) -> None:
        self._watches = [each for each in self._watches if each is not changed]

    def leave(self, written: Written) -> None:
        """Keep what was written of a session. One without the log probabilities of all its tokens is not kept."""
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
        """Return what a new request goes on with, None if it is none of those that are left."""
        self.expire()
        _, written = self._left.get((request.caller, name_of_client(request.session)), (0.0, None))
        fresh = len(request.tokens) == request.prompt_tokens
        return written if written is not None and fresh and written.follows(request) else None

    def forget(self, request: Open) -> None:
        """Forget what was left of a session that goes on, or for which there is another request."""
        self._forget((request.caller, name_of_client(request.session)))

    def expire(self) -> None:
        """Forget those that were left too long ago."""
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
    """What was written of the sessions of one orchestrator; those that have ended are forgotten after `seconds`, within
    which it shows whether the orchestrator itself is lost."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: dict[str, Written] = {}
        self._ended: deque[tuple[float, Written]] = deque()  # until when each is kept

    def open(self, written: Written) -> None:
        """Begin a session, or go on with one."""
        self._open[written.request.session] = written

    def caller_of(self, session: str) -> str:
        """Return the name of the key that an open session's request came with, empty for one that is not open."""
        written = self._open.get(session)
        return "" if written is None else written.request.caller

    def __contains__(self, session: str) -> bool:
        return session in self._open

    def write(self, commit: Commit) -> None:
        """Write down a round that is told."""
        written = self._open.get(commit.at.session)
        if written is not None:
            written.add(commit)
            if commit.finish_reason is not FinishReason.NONE:
                self._ended.append((time.monotonic() + self._seconds, self._open.pop(commit.at.session)))
        while self._ended and self._ended[0][0] <= time.monotonic():
            self._ended.popleft()

    def close(self, session: str) -> None:
        """Forget a session that is over."""
        self._open.pop(session, None)

    def __iter__(self) -> Iterator[Written]:
        yield from self._open.values()
        yield from (written for _, written in self._ended)
