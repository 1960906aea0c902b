"""The callers of both gateways and their use of their limits. Code of a request finds its caller by current_caller.

Requests at once are counted while they run. Tokens a minute are a bucket that holds a minute's worth and fills at a
steady rate: a request is accepted while the bucket is not empty, and takes the tokens of its prompt at once and those
of its answer as they come. Shared targets report a key's use through other orchestrators (target_service/usage.py).
"""

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from orchestrator.requests.keys import Key, digest_of
from specahead.wire.errors import ResourceExhausted, ServiceError, Unauthenticated
from specahead.wire.messages import CallerUsage

_MOST_ADDRESSES = 256  # that are remembered of a key
FREE = 10  # wrong keys from an address that cost it nothing
LONGEST = 60.0  # seconds that an address waits at most
_FORGOTTEN_AFTER = 600.0  # seconds without a wrong key
_MOST_WRONG = 10_000  # addresses with wrong keys that are remembered


class WrongKey(Unauthenticated):
    """A key was sent that is not allowed."""


@dataclass(eq=False)
class Caller:
    """The holder of a key."""

    key: Key
    clock: Callable[[], float] = time.monotonic
    running: int = 0
    """Requests that run now."""
    elsewhere: dict[str, int] = field(default_factory=dict)
    """Requests that run through other orchestrators, by target."""
    allowed: bool = True
    """Whether the key is still allowed."""
    addresses: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The addresses that used it last."""
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
        if key.requests and self.running + sum(self.elsewhere.values()) >= key.requests:
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

    def note_address(self, address: str) -> None:
        """Remember an address, and forget the one that was used longest ago."""
        self.addresses[address] = None
        self.addresses.move_to_end(address)
        if len(self.addresses) > _MOST_ADDRESSES:
            self.addresses.popitem(last=False)

    def pay(self, tokens: int) -> None:
        """Take tokens from the bucket, which may become negative."""
        if self.key.tokens_per_minute:
            self.tokens = self._left() - tokens

    def _left(self) -> float:
        now, rate = self.clock(), self.key.tokens_per_minute
        self.tokens, self.at = min(float(rate), self.tokens + (now - self.at) * rate / 60), now
        return self.tokens


@dataclass
class _Wrong:
    """The wrong keys of one address."""

    count: int = 0
    last: float = 0.0
    until: float = 0.0


class WrongKeys:
    """Counts the wrong keys of each address and makes it wait, longer each time: trying many keys leads nowhere.

    Of more than _MOST_WRONG addresses those are forgotten that sent a wrong key longest ago.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, _Wrong] = OrderedDict()

    def check(self, address: str) -> None:
        """Raise ResourceExhausted while an address has to wait."""
        found = self._by_address.get(address)
        if found is not None and (left := found.until - self._clock()) > 0:
            seconds = math.ceil(left)
            message = f"{found.count} wrong API keys came from this address; try again in {seconds} s"
            raise ResourceExhausted(message, retry_after=seconds)

    def add(self, address: str) -> None:
        """Count a wrong key. From the eleventh on the address has to wait: 1 s, 2 s, 4 s and so on, up to LONGEST."""
        now = self._clock()
        found = self._by_address.setdefault(address, _Wrong())
        self._by_address.move_to_end(address)
        if now - found.last > _FORGOTTEN_AFTER:
            found.count = 0
        found.count, found.last = found.count + 1, now
        if found.count > FREE:
            found.until = now + min(LONGEST, 2.0 ** min(found.count - FREE - 1, 10))
        if len(self._by_address) > _MOST_WRONG:
            self._by_address.popitem(last=False)


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
        self._wrong_keys = WrongKeys()
        self._elsewhere: dict[str, list[Caller]] = {}  # with requests through other orchestrators, by target

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

    def count_elsewhere(self, target: str, usage: Sequence[CallerUsage]) -> None:
        """Count the use of keys through other orchestrators, as a target reports it; empty if the target is lost."""
        for caller in self._elsewhere.pop(target, []):
            del caller.elsewhere[target]
        by_name = {caller.name: caller for caller in self._by_digest.values()} if usage else {}
        for each in usage:
            if (user := by_name.get(each.caller)) is not None:
                user.elsewhere[target] = each.requests
                user.pay(each.tokens_used)
                self._elsewhere.setdefault(target, []).append(user)

    def admit(self, bearer: str) -> Caller:
        """Return the caller with this key and make it the task's. Raises Unauthenticated.

        `locate` has to be called next, whether or not this raises.
        """
        caller = _ANYONE
        if self._by_digest:
            if not bearer:
                raise Unauthenticated("no API key was sent; send it as `Authorization: Bearer KEY`")
            # A search by hash takes the same time however much of a key was right.
            found = self._by_digest.get(digest_of(bearer))
            if found is None:
                raise WrongKey("the API key is not allowed here")
            caller = found
        _CALLER.set(caller)
        return caller

    def locate(self, address: str, refusal: ServiceError | None = None) -> None:
        """Set the address of the task's requests. refusal: the error that `admit` raised.

        Raises ResourceExhausted if too many wrong keys came from the address, also for a right key, unless that key was
        used from there before.
        """
        _ADDRESS.set(address)
        if isinstance(refusal, WrongKey):
            self._wrong_keys.check(address)
            self._wrong_keys.add(address)
        elif refusal is None and (caller := _CALLER.get()) is not _ANYONE:
            if address not in caller.addresses:
                self._wrong_keys.check(address)
            caller.note_address(address)
