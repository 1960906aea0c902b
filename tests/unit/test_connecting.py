"""When the services of a launch count as connected, and what is said where they are not."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from orchestrator.cluster.connecting import wait_until_connected
from specahead.wire.errors import ClusterError
from specahead.wire.messages import ServiceStatus

ADDRESSES = {"target-1": "a:1", "target-2": "b:2", "draft": "c:3"}
GONE, STRANGER = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED


def _answers(attached: list[str], refusal: str = "") -> Any:
    async def ask() -> ServiceStatus:
        return ServiceStatus("any", 1, attached, refusal, {}, {})

    return SimpleNamespace(status=ask)


def _fails(code: grpc.StatusCode) -> Any:
    async def ask() -> ServiceStatus:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")

    return SimpleNamespace(status=ask)


async def connect(services: Mapping[str, Any], connected: bool = True) -> list[ServiceStatus]:
    router: Any = SimpleNamespace(connected=connected)
    return await wait_until_connected(router, services, lambda: ADDRESSES, 0.2)


async def test_a_target_with_a_draft_is_enough_whatever_else_is_missing() -> None:
    other = {"target-2": _fails(GONE), "draft": _answers(["target-1"])}
    assert len(await connect({"target-1": _answers(["draft"])} | other)) == 1
    assert len(await connect({"target-1": _answers([]), "target-2": _answers([])})) == 2, "nobody has a draft"


@pytest.mark.parametrize(
    ("services", "words"),
    [
        ({"target-1": _fails(GONE), "draft": _answers([])}, "the target-1 service at a:1 does not answer"),
        ({"target-1": _answers([]), "draft": _answers([])}, "the target at a:1 answers, and no draft is attached"),
        (
            {"target-1": _answers([]), "target-2": _answers([]), "draft": _answers([])},
            "the target at a:1, b:2 answers, and no draft",
        ),
        ({"target-1": _answers([]), "draft": _fails(STRANGER)}, "the draft service at c:3 lets nobody in"),
        ({"target-1": _answers([], "do not fit: γ"), "draft": _answers([])}, "do not fit: γ"),
    ],
)
async def test_what_is_wrong_is_said(services: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        await connect(services)


async def test_a_target_to_which_the_router_has_no_stream_is_waited_for() -> None:
    with pytest.raises(ClusterError, match="not connected within"):
        await connect({"target-1": _answers(["draft"]), "draft": _answers(["target-1"])}, connected=False)
