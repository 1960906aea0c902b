"""Services that another launch has placed are found as they come, move and go."""

import asyncio
import sys

import pytest

from orchestrator.cluster.directory import Directory
from orchestrator.cluster.placement import addresses_in, keep_found, placed_services
from specahead.wire.errors import ClusterError
from tests.launch_settings import launch_settings
from tests.unit.until import until


async def test_services_of_another_launch_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known stays while Ray does not answer."""
    monkeypatch.setattr("orchestrator.cluster.placement.BEAT_SECONDS", 0.01)
    directories = {side: Directory() for side in ("target", "draft")}
    there = {"target-1": "a:1", "draft": "b:1"}
    failing = 0

    def look() -> dict[str, str]:
        nonlocal failing
        if failing:
            failing -= 1
            raise ConnectionError("no Ray")
        return dict(there)

    following = asyncio.create_task(keep_found(look, directories))
    await until(lambda: addresses_in(directories) == there)
    assert directories["draft"].addresses == {"draft": "b:1"}
    there |= {"target-1": "a:9", "target-2": "d:1"}
    await until(lambda: addresses_in(directories) == there)
    failing = 3
    del there["target-1"]
    await until(lambda: addresses_in(directories) == there)
    assert failing == 0
    following.cancel()


def test_a_ray_that_cannot_be_imported_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "orchestrator.cluster.fleet", raising=False)
    with pytest.raises(ClusterError, match="Ray, which places the services, cannot be imported"):
        placed_services(launch_settings((), {})).__enter__()
