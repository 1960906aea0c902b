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
from wire.errors import ServiceError
from wire.messages import Beat, DraftEvent, Hello
from wire.outbox import Outbox
from wire.server import OPTIONS
from wire.streams import BEAT_SECONDS, PATIENCE, exchange, read_frames

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
        except (ServiceError, TimeoutError) as error:
            log.warning("stream to %s ended: %s", state.target, str(error) or "it does not answer the handshake")
        except Exception:
            log.exception("stream to %s failed; it is dialled again", state.target)
        finally:
            state.attached = ""
        await asyncio.sleep(_REDIAL_SECONDS)


async def _speculate(
    channel: grpc.aio.Channel, state: LinkState, hello: Hello, drafter: Drafter, wake: asyncio.Event
) -> None:
    """Draft for a target until it ends the stream.

    Raises its status if that is an error, ServiceError for what it says wrongly or if it hangs, TimeoutError if it does
    not answer the handshake.
    """
    call = speculation_pb2_grpc.SpeculationStub(channel).Speculate()
    await call.write(speculation.DraftFrame(hello=convert.hello_to_pb(hello)))
    async with asyncio.timeout(PATIENCE * BEAT_SECONDS):
        first = await call.read()
    if first is grpc.aio.EOF or first.WhichOneof("body") != "welcome":
        return
    target = convert.hello_from_pb(first.welcome.target)
    state.attached, state.refusal = target.peer, ""
    outbox: Outbox[DraftEvent | Beat] = Outbox()
    peer = TargetPeer(outbox.put)
    drafter.attach(peer)

    def receive(frame: speculation.TargetFrame) -> None:
        for pb in frame.batch.events:
            event = convert.target_event_from_pb(pb)
            if not isinstance(event, Beat):
                drafter.receive(peer, event)
                wake.set()

    async def write(events: list[DraftEvent | Beat]) -> None:
        await call.write(convert.draft_events_to_pb(events))

    try:
        await exchange(read_frames(call), receive, outbox, write, f"the target at {state.target}")
    finally:
        call.cancel()
        drafter.detach(peer)
        wake.set()
