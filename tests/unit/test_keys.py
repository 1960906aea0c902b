"""API keys: how they are made and read, who a caller is, and what limits do."""

import asyncio
from pathlib import Path

import pytest

from cli.main import main
from config import SettingsError
from config.access import ClientAccess
from orchestrator.callers import Caller, Callers, current_caller
from orchestrator.keys import PREFIX, Key, digest_of, make_key, read_keys
from tests.unit.clock import Clock
from wire.errors import ResourceExhausted, Unauthenticated


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


def test_keys_are_random() -> None:
    assert len({make_key("a")[0] for _ in range(100)}) == 100


@pytest.mark.parametrize("name", ["", "two words", "#one", " a", "a\nb"])
def test_a_name_that_no_line_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="one word"):
        make_key(name)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        make_key("a", requests=-1)


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
    with pytest.raises(SettingsError, match="holds no key"):
        read_keys(file_of(tmp_path, "# none"))
    with pytest.raises(SettingsError, match="the name alice is there twice"):
        read_keys(file_of(tmp_path, line, make_key("alice")[1]))
    with pytest.raises(SettingsError, match=r"the key .* is there twice"):
        read_keys(file_of(tmp_path, line, line.replace("alice", "bob")))
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(ClientAccess(api_keys_file=str(tmp_path / "none")))


def test_who_has_no_key_or_a_wrong_one_is_refused() -> None:
    key, line = make_key("a")
    callers = Callers([Key("a", line.split("sha256:")[1])])
    assert callers.admit(key).name == "a"
    for bearer in ("", "x", key[:-1], key + "x", "naïve\udcff"):
        with pytest.raises(Unauthenticated):
            callers.admit(bearer)
    assert Callers([]).admit("").name == ""


async def test_tasks_have_callers_of_their_own() -> None:
    callers = Callers([Key(name, digest_of(name)) for name in "ab"])

    async def ask(name: str) -> str:
        callers.admit(name)
        await asyncio.sleep(0)
        return current_caller().name

    before = current_caller()
    assert await asyncio.gather(ask("a"), ask("b")) == ["a", "b"]
    assert current_caller() is before


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


def test_without_limits_nothing_is_counted_down() -> None:
    caller = Caller(Key("a", ""))
    caller.pay(10**9)
    with caller.request():
        assert caller.tokens == 0
