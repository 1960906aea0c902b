"""`specahead health`: what it says of a port that serves, of one that does not, and of none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from specahead.cli.main import main
from specahead.wire.access import OPEN, Guard
from specahead.wire.server import RunningServer, start_server
from specahead.wire.tls import read_tls
from tests.certificates import make_certificate


@contextlib.asynccontextmanager
async def running(guard: Guard = OPEN) -> AsyncIterator[RunningServer]:
    server = await start_server("127.0.0.1", 0, [], guard)
    try:
        yield server
    finally:
        await server.stop(0)


async def ask(*arguments: str) -> None:
    await asyncio.to_thread(main, ["health", *arguments])


async def test_a_port_that_serves_is_passed_over_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    async with running() as server:
        await server.set_serving(True)
        await ask(server.address)
    assert capsys.readouterr() == ("", "")


async def test_a_port_that_does_not_serve_yet_fails() -> None:
    async with running() as server:
        with pytest.raises(SystemExit, match="answers that it does not serve"):
            await ask(server.address)


async def test_a_port_where_nobody_listens_fails() -> None:
    async with running() as server:
        address = server.address
    with pytest.raises(SystemExit, match="UNAVAILABLE"):
        await ask(address, "--timeout", "2")


async def test_mutual_tls_is_spoken_by_the_name_in_the_certificate(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "service", trustme.CA())
    async with running(Guard(tls=read_tls(files.cert, files.key, files.ca))) as server:
        await server.set_serving(True)
        await ask(server.address, *files.flags())
        await ask(server.address, *files.flags(), "--tls-name", "localhost")
        with pytest.raises(SystemExit, match="UNAVAILABLE"):
            await ask(server.address, *files.flags(), "--tls-name", "elsewhere", "--timeout", "2")
        with pytest.raises(SystemExit, match="UNAVAILABLE"):
            await ask(server.address, "--timeout", "2")
