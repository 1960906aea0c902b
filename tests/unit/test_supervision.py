"""What hangs is replaced, what starts or dies is not, and a Ray that cannot be brought back ends the launch."""

import asyncio
from collections import deque
from typing import Any

import grpc
import pytest

from orchestrator.cluster.supervision import Supervisor
from specahead.wire.errors import ClusterError
from specahead.wire.messages import ServiceStatus

STATUS = ServiceStatus("target", 1, [], "", {}, {})
HANGS, GONE = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE


class Service:
    """Answers as the script says, the last entry again and again: None is an answer, else the status of none."""

    def __init__(self, *script: grpc.StatusCode | None) -> None:
        self.script = deque(script)

    async def status(self) -> ServiceStatus:
        code = self.script.popleft() if len(self.script) > 1 else self.script[0]
        if code is None:
            return STATUS
        await asyncio.sleep(0.01)
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


class Placement:
    """Notes what it is told to do.

    lost: how many restarts it takes, the last of which works. away: how often nobody tells whether it is alive.
    """

    def __init__(self, lost: int = 0, away: int = 0, owns_ray: bool = True) -> None:
        self.away, self.owns_ray = away, owns_ray
        self.replaced: list[str] = []
        self.addresses: dict[str, str] = {}
        self.restarts, self.lost = 0, lost

    def locate(self, name: str) -> str:
        return self.addresses.get(name, "")

    def replace(self, name: str) -> None:
        self.replaced.append(name)

    def is_alive(self) -> bool:
        if self.away:
            self.away -= 1
            raise ClusterError("no Ray answers")
        return self.lost == 0

    def restart(self) -> None:
        self.restarts += 1
        self.lost -= 1
        if self.lost:
            raise ConnectionError("no Ray")


def answering() -> Any:
    """Return a service that answers, by its name."""
    return {"target": Service(None)}


@pytest.fixture(autouse=True)
def short_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.cluster.supervision.BEAT_SECONDS", 0.01)


def put(name: str, address: str) -> None:
    raise AssertionError("nothing has moved")


async def watch(placement: Placement, **services: Service) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await Supervisor(services, placement, put).run()


async def first_found(placement: Placement, **services: Service) -> tuple[str, str]:
    """Supervise services until one is found elsewhere; returns its name and where that is."""
    found: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    def tell(name: str, address: str) -> None:
        if not found.done():
            found.set_result((name, address))

    watching = asyncio.create_task(Supervisor(services, placement, tell).run())
    try:
        async with asyncio.timeout(20):
            return await found
    finally:
        watching.cancel()


async def test_a_service_that_stops_answering_is_replaced_and_no_other() -> None:
    placement = Placement()
    await watch(placement, target=Service(None, None, HANGS), draft=Service(None))
    assert placement.replaced == ["target"]  # and not again while it does not answer: it starts


@pytest.mark.parametrize(
    "script",
    [
        [HANGS],  # it starts and has never answered
        [None, *[HANGS] * 7, None, *[HANGS] * 7, None],  # it is slow
        [None, *[HANGS] * 7, GONE, *[HANGS] * 30, None],  # it died and starts
    ],
)
async def test_what_starts_or_is_slow_is_left_alone(script: list[grpc.StatusCode | None]) -> None:
    placement = Placement()
    await watch(placement, target=Service(*script))
    assert placement.replaced == []


@pytest.mark.parametrize("script", [[None, GONE], [None, *[HANGS] * 8, HANGS]])
async def test_a_service_that_is_gone_or_was_replaced_is_looked_for(script: list[grpc.StatusCode | None]) -> None:
    """One that answers, or starts at the same place, is not taken for another."""
    placement = Placement()
    placement.addresses = {"target-1": "127.0.0.2:7", "draft": "127.0.0.3:8"}
    services = {"target-1": Service(*script), "target-2": Service(GONE), "draft": Service(None)}
    assert await first_found(placement, **services) == ("target-1", "127.0.0.2:7")


async def test_a_lost_ray_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    placement, told = Placement(lost=3), []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await Supervisor(answering(), placement, put, lambda: told.append(placement.restarts)).run()
    assert placement.restarts == 3
    assert told == [1, 2, 3]
    assert "Ray is lost" in caplog.text
    assert "attempt 2 of 3" in caplog.text


async def test_a_ray_that_is_lost_for_good_ends_the_launch() -> None:
    with pytest.raises(ClusterError, match="could not be placed again: no Ray"):
        await Supervisor(answering(), Placement(lost=9), put).run()


async def test_a_head_that_stays_away_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.cluster.supervision.RAY_AWAY", 0.1)
    placement = Placement(lost=9, away=10**9, owns_ray=False)
    with pytest.raises(ClusterError, match="could not be placed again"):
        await Supervisor(answering(), placement, put).run()
    assert 10**9 - placement.away > 3, "it was asked again and again"
