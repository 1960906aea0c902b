"""Services that another launch has placed are found as they come, move and go."""

import asyncio

import pytest

from orchestrator.cluster.directory import Directory
from orchestrator.cluster.placement import keep_found


async def test_services_of_another_launch_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has its own; what is known stays while Ray does not answer."""
    monkeypatch.setattr("orchestrator.cluster.placement.BEAT_SECONDS", 0.01)
    models = {name: {side: Directory() for side in ("target", "draft")} for name in ("big", "small")}
    there = {"target-1@big": "a:1", "draft@big": "b:1", "target@small": "c:1"}
    failing = 0

    def look() -> dict[str, str]:
        nonlocal failing
        if failing:
            failing -= 1
            raise ConnectionError("no Ray")
        return dict(there)

    def known() -> dict[str, str]:
        return {n: at for where in models.values() for each in where.values() for n, at in each.addresses.items()}

    async def until_known() -> None:
        async with asyncio.timeout(10):
            while known() != there:
                await asyncio.sleep(0.005)

    following = asyncio.create_task(keep_found(look, models))
    await until_known()
    assert models["small"]["target"].addresses == {"target@small": "c:1"}
    there |= {"target-1@big": "a:9", "target-2@big": "d:1"}
    await until_known()
    failing = 3
    del there["target-1@big"]
    await until_known()
    assert failing == 0
    following.cancel()
