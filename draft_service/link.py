"""The draft's end of a Speculate stream: dial a target, shake hands, carry events; dial again when it breaks."""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from protos import speculation_pb2 as speculation
from protos import speculation_pb2_grpc
from wire import convert
from wire.access import PeerAccess
from wire.messages import DraftEvent, Hello
from wire.outbox import Outbox

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 0.2
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)


@dataclass
class LinkState:
    """What the outside may know of a link."""

    target: str
    attached: str = ""  # the target's name while the stream stands
    refusal: str = ""  # why the target refused the last handshake


async def keep_link(state: LinkState, access: PeerAccess, hello: Hello, drafter: Drafter, wake: asyncio.Event) -> None:
    """Runs until cancelled."""
    last = ""
    while True:
        try:
            async with access.dial(state.target) as channel:
                await _speculate(channel, access, state, hello, drafter, wake)
        except grpc.aio.AioRpcError as error:
            state.refusal = error.details() or "" if error.code() in _REFUSALS else ""
            reason = f"{error.code().name} {error.details()}"
            if reason != last or state.attached:  # a target that is not there yet is dialled many times
                expected = error.code() is grpc.StatusCode.UNAVAILABLE and not state.attached
                level = logging.INFO if expected else logging.WARNING
                log.log(level, "no stream to the target", extra={"target": state.target, "reason": reason})
            last = reason
        finally:
            state.attached = ""
        await asyncio.sleep(_REDIAL_SECONDS)


async def _speculate(
    channel: grpc.aio.Channel, access: PeerAccess, state: LinkState, hello: Hello, drafter: Drafter, wake: asyncio.Event
) -> None:
    """Until the target ends the stream; read() raises its status if that is an error."""
    call = speculation_pb2_grpc.SpeculationStub(channel).Speculate(metadata=access.metadata)
    await call.write(speculation.DraftFrame(hello=convert.hello_to_pb(hello)))
    first = await call.read()
    if first is grpc.aio.EOF or first.WhichOneof("body") != "welcome":
        return
    target = convert.hello_from_pb(first.welcome.target)
    state.attached, state.refusal = target.peer, ""
    outbox: Outbox[DraftEvent] = Outbox()
    peer = TargetPeer(outbox.put)
    drafter.attach(peer)
    sender = asyncio.create_task(_send(call, outbox))
    try:
        # read(), not iteration: gRPC forbids mixing the two on one call.
        while (frame := await call.read()) is not grpc.aio.EOF:
            for event in frame.batch.events:
                drafter.receive(peer, convert.target_event_from_pb(event))
            wake.set()
    finally:
        outbox.close()
        sender.cancel()
        drafter.detach(peer)
        wake.set()


async def _send(call: grpc.aio.StreamStreamCall, outbox: Outbox[DraftEvent]) -> None:
    async for events in outbox:
        await call.write(convert.draft_events_to_pb(events))
