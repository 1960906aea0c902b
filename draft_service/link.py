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
from wire.messages import DraftEvent, Hello
from wire.outbox import Outbox
from wire.server import OPTIONS

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 0.2


@dataclass
class LinkState:
    """What the outside may know of a link."""

    target: str
    attached: str = ""  # the target's name while the stream stands
    refusal: str = ""  # why the target refused the last handshake


async def keep_link(state: LinkState, hello: Hello, drafter: Drafter, wake: asyncio.Event) -> None:
    """Runs until cancelled."""
    while True:
        try:
            async with grpc.aio.insecure_channel(state.target, options=OPTIONS) as channel:
                await channel.channel_ready()
                await _speculate(channel, state, hello, drafter, wake)
        except grpc.aio.AioRpcError as error:
            refused = error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
            state.refusal = error.details() or "" if refused else ""
            log.warning("stream to %s ended: %s %s", state.target, error.code().name, error.details())
        finally:
            state.attached = ""
        await asyncio.sleep(_REDIAL_SECONDS)


async def _speculate(
    channel: grpc.aio.Channel, state: LinkState, hello: Hello, drafter: Drafter, wake: asyncio.Event
) -> None:
    """Until the target ends the stream; read() raises its status if that is an error."""
    call = speculation_pb2_grpc.SpeculationStub(channel).Speculate()
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
