"""API keys: random words. Only their hashes are kept, each with its holder's name and limits.

A line of the keys' file: `NAME sha256:HEX [requests=N] [tokens_per_minute=N]`. Empty lines and lines that begin with #
are ignored. A key has 256 random bits, so that no search can find it by its hash.
"""

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specahead.config import SettingsError
from specahead.config.access import ClientAccess, read_text
from specahead.wire.files import version_of

log = logging.getLogger(__name__)

PREFIX = "sk-specahead-"
_LINE = re.compile(
    r"(?P<name>\S+) +sha256:(?P<digest>[0-9a-f]{64})"
    r"(?: +requests=(?P<requests>\d+))?(?: +tokens_per_minute=(?P<tokens_per_minute>\d+))?"
)


@dataclass(frozen=True)
class Key:
    """A key and its limits."""

    name: str
    digest: str
    requests: int = 0
    """The most requests at once; 0: any number."""
    tokens_per_minute: int = 0
    """0: any number."""


def digest_of(key: str) -> str:
    """Return the hash of a key, in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def make_key(name: str, requests: int = 0, tokens_per_minute: int = 0) -> tuple[str, str]:
    """Return a new key and its line for the file. Raises ValueError for a name that a line cannot hold."""
    if not re.fullmatch(r"[^\s#]\S*", name):
        raise ValueError(f"the name of a key is one word that does not begin with #, got {name!r}")
    if min(requests, tokens_per_minute) < 0:
        raise ValueError(f"limits are at least 0, got requests={requests}, tokens_per_minute={tokens_per_minute}")
    key = PREFIX + secrets.token_urlsafe(32)
    limits = {"requests": requests, "tokens_per_minute": tokens_per_minute}
    return key, " ".join([name, f"sha256:{digest_of(key)}", *(f"{k}={v}" for k, v in limits.items() if v)])


def read_keys(access: ClientAccess) -> list[Key]:
    """Return the keys that clients may use: the one in the settings, and those of the file.

    Raises SettingsError for a file that cannot be read, has no key, or has a name or key twice.
    """
    keys = [Key("api_key", digest_of(access.api_key))] if access.api_key else []
    if access.api_keys_file:
        keys += _read_file(access.api_keys_file)
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise SettingsError(f"api_keys_file {access.api_keys_file}: the {what} {twice} occurs twice")
    return keys


async def watch_keys(access: ClientAccess, take: Callable[[Sequence[Key]], None], every: float = 1.0) -> None:
    """Call `take` with the keys whenever their file has changed. Looks each `every` seconds until cancelled.

    If `read_keys` refuses the file, that is logged, and the former keys stay allowed.
    """
    seen = await asyncio.to_thread(version_of, access.api_keys_file)
    while True:
        await asyncio.sleep(every)
        version = await asyncio.to_thread(version_of, access.api_keys_file)
        if version == seen:
            continue
        seen = version
        try:
            keys = await asyncio.to_thread(read_keys, access)
        except SettingsError as error:
            log.error("the keys' file has changed and cannot be used; the former keys stay allowed: %s", error)
            continue
        take(keys)
        log.info("the keys' file has changed and was read again", extra={"keys": len(keys)})


def _read_file(path: str) -> Sequence[Key]:
    keys = []
    for number, line in enumerate(read_text(path, "api_keys_file").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:  # the message does not show the line, which may have a key in place of its hash
            raise SettingsError(
                f"api_keys_file {path}, line {number}: expected NAME sha256:HEX [requests=N] [tokens_per_minute=N], "
                "as `specahead key NAME` makes it"
            )
        requests, tokens = (int(found[limit] or 0) for limit in ("requests", "tokens_per_minute"))
        keys.append(Key(found["name"], found["digest"], requests, tokens))
    if not keys:
        raise SettingsError(f"api_keys_file {path} has no key; `specahead key NAME >> {path}` adds one")
    return keys
