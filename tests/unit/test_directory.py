"""Who looks services up learns of each change."""

import asyncio

import pytest

from orchestrator.cluster.directory import Directory


async def test_a_change_wakes_who_waits_and_nothing_else_does() -> None:
    directory = Directory({"target-0": "127.0.0.1:1"})
    waiting = asyncio.create_task(directory.changed())
    await asyncio.sleep(0)
    directory.put("target-0", "127.0.0.1:1")
    await asyncio.sleep(0)
    assert not waiting.done()
    directory.put("target-0", "127.0.0.1:2")
    async with asyncio.timeout(1):
        await waiting
    again = asyncio.create_task(directory.changed())
    await asyncio.sleep(0)
    assert not again.done() and directory.addresses == {"target-0": "127.0.0.1:2"}
    directory.remove("target-0")
    async with asyncio.timeout(1):
        await again
    assert not directory.addresses
    with pytest.raises(KeyError):
        directory.remove("target-0")
