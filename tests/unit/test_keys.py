"""API keys: how they are made and read, who a caller is, and what limits do."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.requests.access import Proxies
from orchestrator.requests.callers import _CALLER, Caller, Callers, current_caller
from orchestrator.requests.keys import PREFIX, Key, digest_of, make_key, read_keys, watch_keys
from specahead.cli.main import main
from specahead.config import SettingsError
from specahead.config.access import ClientAccess
from specahead.wire.errors import ResourceExhausted, Unauthenticated
from tests.unit.clock import Clock
from tests.unit.until import until


@pytest.fixture(autouse=True)
def _caller_of_this_test() -> Iterator[None]:
    """Who was admitted here is not the caller of the tests that follow in this process."""
    before = _CALLER.set(current_caller())
    yield
    _CALLER.reset(before)


def file_of(folder: Path, *lines: str) -> ClientAccess:
    file = folder / "keys"
    file.write_text("\n".join(lines))
    return ClientAccess(api_keys_file=str(file))


def test_the_command_makes_a_line_that_admits_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key itself is in no file."""
    main(["key", "alice", "--requests", "4", "--tokens-per-minute", "600"])
    printed = capsys.readouterr()
    key, line = printed.err.strip(), printed.out
    assert key.startswith(PREFIX) and len(key) > 50 and key not in line
    (read,) = read_keys(file_of(tmp_path, "# who", "", line))
    assert read == Key("alice", digest_of(key), 4, 600)
    assert Callers([read]).admit(key).name == current_caller().name == "alice"


def test_the_file_and_the_one_key_add_up(tmp_path: Path) -> None:
    file = file_of(tmp_path, make_key("a")[1], make_key("b")[1]).api_keys_file
    access = ClientAccess(api_key="only-this", api_keys_file=file)
    assert [key.name for key in read_keys(access)] == ["api_key", "a", "b"]
    assert read_keys(ClientAccess()) == []
    assert "only-this" not in repr(access)


def test_lines_that_are_none_are_refused_without_showing_them(tmp_path: Path) -> None:
    """A key that was pasted into the file stays out of the log."""
    key, line = make_key("alice")
    for wrong in (f"alice {key}", f"alice sha256:{key}", f"{line} requests=many", f"{line} tokens=4", line.upper()):
        with pytest.raises(SettingsError, match="line 2: expected NAME sha256:HEX") as refused:
            read_keys(file_of(tmp_path, "", wrong))
        assert key not in str(refused.value)


def test_a_file_without_keys_or_with_one_twice_is_refused(tmp_path: Path) -> None:
    line = make_key("alice")[1]
    with pytest.raises(SettingsError, match="has no key"):
        read_keys(file_of(tmp_path, "# none"))
    with pytest.raises(SettingsError, match="the name alice occurs twice"):
        read_keys(file_of(tmp_path, line, make_key("alice")[1]))
    with pytest.raises(SettingsError, match=r"the key .* occurs twice"):
        read_keys(file_of(tmp_path, line, line.replace("alice", "bob")))
    with pytest.raises(SettingsError, match=r"none cannot be read: No such file or directory$"):
        read_keys(ClientAccess(api_keys_file=str(tmp_path / "none")))


def test_who_has_no_key_or_a_wrong_one_is_refused() -> None:
    key, line = make_key("a")
    callers = Callers([Key("a", line.split("sha256:")[1])])
    assert callers.admit(key).name == "a"
    for bearer in ("", "x", key[:-1], key + "x", "naïve\udcff"):
        with pytest.raises(Unauthenticated):
            callers.admit(bearer)
    assert Callers([]).admit("").name == ""


def test_requests_at_once() -> None:
    caller = Caller(Key("a", "", requests=2))
    with caller.request(), caller.request():
        with pytest.raises(ResourceExhausted, match="2 requests at once") as refused, caller.request():
            pass
        assert refused.value.retry_after == 1
    with caller.request():
        assert caller.running == 1
    with pytest.raises(KeyError), caller.request():
        raise KeyError
    assert caller.running == 0


def test_tokens_a_minute() -> None:
    """A request may overdraw; the next waits until the bucket has filled again, and is told how long."""
    clock = Clock()
    caller = Caller(Key("a", "", tokens_per_minute=60), clock.monotonic)
    with caller.request():
        caller.pay(90)
    with pytest.raises(ResourceExhausted, match="60 tokens a minute") as refused, caller.request():
        pass
    assert refused.value.retry_after == 31
    clock.now += 31
    with caller.request():
        caller.pay(1)
    clock.now += 1000
    with caller.request():
        caller.pay(60)  # no more than a minute's worth is saved up
    with pytest.raises(ResourceExhausted), caller.request():
        pass


# A file that changes


async def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New keys are admitted and old ones refused; a file that cannot be used changes nothing."""
    (alice, first), (bob, second), (eve, third) = (make_key(name) for name in ("alice", "bob", "eve"))
    access = file_of(tmp_path, first, second)
    callers = Callers(read_keys(access))
    taken: list[int] = []

    def take(keys: Sequence[Key]) -> None:
        callers.replace(keys)
        taken.append(len(keys))

    watching = asyncio.create_task(watch_keys(access, take, 0.005))
    try:
        await asyncio.sleep(0.05)
        assert taken == []
        file_of(tmp_path, second, third)
        await until(lambda: taken == [2])
        assert callers.admit(bob).name == "bob" and callers.admit(eve).name == "eve"
        with pytest.raises(Unauthenticated):
            callers.admit(alice)
        file_of(tmp_path, "no key at all")
        await until(lambda: "stay allowed" in caplog.text)
        assert callers.admit(eve).name == "eve" and taken == [2]
        file_of(tmp_path, first)
        await until(lambda: taken == [2, 1])
        assert callers.admit(alice).name == "alice"
    finally:
        watching.cancel()


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", "203.0.113.7", "192.0.2.1"),  # no proxy of ours: it may say what it likes
        ("10.0.0.7", "203.0.113.7", "203.0.113.7"),
        ("10.0.0.7", "spoofed, 203.0.113.7, 10.0.0.9", "203.0.113.7"),
        ("10.0.0.7", "", "10.0.0.7"),
        ("10.0.0.7", "[2001:db8:1:2:3:4:5:6]:123", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "", "192.0.2.1"),
        ("::ffff:10.0.0.7", "203.0.113.7", "203.0.113.7"),
        ("10.0.0.7", "x" * 9999, "x" * 64),
    ],
)
def test_where_a_client_calls_from(peer: str, forwarded: str, client: str) -> None:
    assert Proxies("10.0.0.0/24, 10.0.1.1").client_of(peer, [("x-forwarded-for", forwarded)]) == client


async def test_tasks_have_callers_of_their_own() -> None:
    callers = Callers([Key(name, digest_of(name)) for name in "ab"])

    async def ask(name: str) -> str:
        callers.admit(name)
        await asyncio.sleep(0)
        return current_caller().name

    before = current_caller()
    assert await asyncio.gather(ask("a"), ask("b")) == ["a", "b"]
    assert current_caller() is before
