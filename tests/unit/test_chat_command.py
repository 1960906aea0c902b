"""`specahead chat` at a terminal, of a server that writes one word and then waits."""

import asyncio
import json
import os
import signal
import sys
from functools import partial
from typing import Any

import pytest

from orchestrator.api.http_server import Connections, serve_http


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """One word of an answer, which goes on until the client leaves."""
    start: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}
    await send(start)
    if scope["method"] == "GET":
        await send({"type": "http.response.body", "body": json.dumps({"data": [{"id": "model"}]}).encode()})
        return
    event = f"data: {json.dumps({'choices': [{'delta': {'content': 'word'}}]})}\n\n"
    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        continue


async def read_until(terminal: int, mark: bytes) -> None:
    shown = b""
    async with asyncio.timeout(30):
        while mark not in shown:
            try:
                shown += os.read(terminal, 4096)
            except BlockingIOError:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
async def test_ctrl_c_ends_an_answer_and_never_the_conversation(handler: signal.Handlers) -> None:
    """Also where it was ignored when the command began, as in what a shell's background job starts."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    async with serve_http(answer, "127.0.0.1", 0, Connections(10)) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specahead.cli", "chat", "--url", address),
            **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
            env=os.environ | {"TERM": "xterm"},
            preexec_fn=partial(signal.signal, signal.SIGINT, handler),
        )
        os.close(theirs)
        try:
            await read_until(ours, b"> ")
            for _ in range(2):
                os.write(ours, b"Hello\n")
                await read_until(ours, b"word")
                process.send_signal(signal.SIGINT)
                await read_until(ours, b"> ")
            os.write(ours, b"Nev")
            await read_until(ours, b"Nev")
            process.send_signal(signal.SIGINT)  # drops the line that is being written
            await read_until(ours, b"> ")
            os.write(ours, b"\x04")
            async with asyncio.timeout(30):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(ours)
