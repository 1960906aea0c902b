"""Which targets a draft serves, as its control service is told, and who tells it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from draft_service.link import Links, LinkState
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.service_status import Lines, keep_drafts_informed
from protos import control_pb2, control_pb2_grpc
from specahead.wire.access import PeerAccess
from specahead.wire.server import RunningServer, start_server
from tests.unit.until import until


class Kept:
    """Stands for keep_link; notes which links are kept."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    async def keep(self, state: LinkState) -> None:
        self.targets.append(state.target)
        try:
            await asyncio.Event().wait()
        finally:
            self.targets.remove(state.target)


async def test_links_are_kept_to_the_targets_that_were_named_last() -> None:
    kept = Kept()
    links = Links(kept.keep)
    for told in (["a", "b"], ["b", "c", "b"], ["b"], []):
        stood = [state for state in links.states if state.target in told]
        links.set_targets(told)
        assert all(state in links.states for state in stood), "what stands is left alone"
        await asyncio.sleep(0)
        assert sorted(kept.targets) == sorted(set(told)) == sorted(state.target for state in links.states)
    links.set_targets(["a"])
    await asyncio.sleep(0)
    await links.close()
    assert not kept.targets and not links.states


class Draft(control_pb2_grpc.DraftControlServicer):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []

    async def SetTargets(self, request: control_pb2.Targets, context: object) -> control_pb2.TargetsSet:
        self.told.append(list(request.addresses))
        return control_pb2.TargetsSet()

    async def Status(self, request: control_pb2.StatusRequest, context: object) -> control_pb2.ServiceStatus:
        return control_pb2.ServiceStatus(peer="draft", version="1.2")


@contextlib.asynccontextmanager
async def running(draft: Draft, access: PeerAccess) -> AsyncIterator[RunningServer]:
    add = control_pb2_grpc.add_DraftControlServicer_to_server
    server = await start_server("127.0.0.1", 0, [(add, draft, "specahead.v1.DraftControl")], access.guard())
    yield server
    await server.stop(0)


async def until_told(draft: Draft, targets: list[str]) -> None:
    await until(lambda: draft.told[-1:] == [targets])


async def test_drafts_are_told_of_targets_that_come_go_and_move_and_again_where_they_start_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that was lost and starts elsewhere knows of no target."""
    monkeypatch.setattr("orchestrator.cluster.service_status.BEAT_SECONDS", 0.3)
    access, draft, anew = PeerAccess("token"), Draft(), Draft()
    targets, drafts = Directory({"target-1": "a:1"}), Directory()
    async with running(draft, access) as first, running(anew, access) as second:
        drafts.put("draft", first.address)
        telling = asyncio.create_task(keep_drafts_informed(Lines([targets, drafts], access), targets))
        await until_told(draft, ["a:1"])
        targets.put("target-2", "b:2")
        await until_told(draft, ["a:1", "b:2"])
        targets.put("target-1", "c:3")
        await until_told(draft, ["c:3", "b:2"])
        await first.stop(0)
        drafts.put("draft", second.address)
        await until_told(anew, ["c:3", "b:2"])
        targets.remove("target-2")
        await until_told(anew, ["c:3"])
        telling.cancel()
    assert ["c:3"] not in draft.told
