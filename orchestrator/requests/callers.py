"""The callers of both gateways and their use of their limits. Code of a request finds its caller by current_caller.

Requests at once are counted while they run. Tokens a minute are a bucket that holds a minute's worth and fills at a
steady rate: a request is accepted while the bucket is not empty, and takes the tokens of its prompt at once and those
of its answer as they come. Each orchestrator counts by itself.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from orchestrator.requests.keys import Key, digest_of
from specahead.wire.errors import ResourceExhausted, Unauthenticated


@dataclass(eq=False)
class Caller:
    """The holder of a key."""

    key: Key
    clock: Callable[[], float] = time.monotonic
    running: int = 0
    """Requests that run now."""
    allowed: bool = True
    """Whether the key is still allowed."""
    tokens: float = field(init=False)
    """In the bucket, at the time `at` in seconds."""
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.at = float(self.key.tokens_per_minute), self.clock()

    @property
    def name(self) -> str:
        """The key's name."""
        return self.key.name

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while the context lasts. Raises ResourceExhausted if the key allows no more now."""
        key = self.key
        if key.requests and self.running >= key.requests:
            raise ResourceExhausted(
                f"key {key.name!r} allows {key.requests} requests at once, and they are running", retry_after=1
            )
        if key.tokens_per_minute and (left := self._left()) <= 0:
            seconds = max(1, math.ceil((1 - left) * 60 / key.tokens_per_minute))
            raise ResourceExhausted(
                f"key {key.name!r} allows {key.tokens_per_minute} tokens a minute, and they are used up; "
                f"try again in {seconds} s",
                retry_after=seconds,
            )
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def take_limits(self, key: Key) -> None:
        """Use the limits of another version of the key, with a full bucket; running requests stay counted."""
        self.key, self.tokens, self.at = key, float(key.tokens_per_minute), self.clock()

    def pay(self, tokens: int) -> None:
        """Take tokens from the bucket, which may become negative."""
        if self.key.tokens_per_minute:
            self.tokens = self._left() - tokens

    def _left(self) -> float:
        now, rate = self.clock(), self.key.tokens_per_minute
        self.tokens, self.at = min(float(rate), self.tokens + (now - self.at) * rate / 60), now
        return self.tokens


_ANYONE = Caller(Key("", ""))  # where no key is needed
_CALLER: ContextVar[Caller] = ContextVar("caller", default=_ANYONE)
_ADDRESS: ContextVar[str] = ContextVar("address", default="")


def current_caller() -> Caller:
    """Return the caller of this task's request."""
    return _CALLER.get()


def current_client() -> str:
    """Return the name under which this task's request shares places: its key's, else its address."""
    name = _CALLER.get().name
    return f"key {name}" if name else _ADDRESS.get()


class Callers:
    """The holders of all allowed keys; without keys everyone may call."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._by_digest = {key.digest: Caller(key) for key in keys}

    def replace(self, keys: Sequence[Key]) -> None:
        """Allow these keys from now on. A key with the same name as before keeps its usage."""
        before, self._by_digest = self._by_digest, {}
        for key in keys:
            caller = before.get(key.digest)
            if caller is None or caller.name != key.name:
                caller = Caller(key)
            elif caller.key != key:
                caller.take_limits(key)
            self._by_digest[key.digest] = caller
        kept = self._by_digest.values()
        for caller in before.values():
            caller.allowed = caller in kept

    def admit(self, bearer: str) -> Caller:
        """Return the caller with this key and make it the task's. Raises Unauthenticated."""
        caller = _ANYONE
        if self._by_digest:
            if not bearer:
                raise Unauthenticated("no API key was sent; send it as `Authorization: Bearer KEY`")
            # A search by hash takes the same time however much of a key was right.
            found = self._by_digest.get(digest_of(bearer))
            if found is None:
                raise Unauthenticated("the API key is not allowed here")
            caller = found
        _CALLER.set(caller)
        return caller

    def locate(self, address: str) -> None:
        """Set the address of the task's requests."""
        _ADDRESS.set(address)
