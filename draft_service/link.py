"""The draft's end of a Speculate stream: dial a target, shake hands, carry events; dial again when it breaks."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from protos import speculation_pb2 as speculation
from protos import speculation_pb2_grpc
from specahead.wire import convert
from specahead.wire.access import PeerAccess
from specahead.wire.errors import ServiceError
from specahead.wire.messages import Beat, DraftEvent, Hello
from specahead.wire.outbox import Outbox
from specahead.wire.streams import BEAT_SECONDS, PATIENCE, exchange, read_frames
from specahead.wire.tasks import end_tasks

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 0.2
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)


@dataclass
class LinkState:
    """A link as `Status` shows it."""

    target: str
    """HOST:PORT."""
    attached: str = ""
    """The target's name while the stream stands."""
    refusal: str = ""
    """Why the target refused the last handshake."""


class Links:
    """The links of a draft, one to each of its targets."""

    def __init__(self, keep: Callable[[LinkState], Coroutine[Any, Any, None]]) -> None:
        """keep: keeps one link until it is cancelled."""
        self._keep = keep
        self._links: dict[str, tuple[LinkState, asyncio.Task[None]]] = {}

    @property
    def states(self) -> list[LinkState]:
        """The state of each link."""
        return [state for state, _ in self._links.values()]

    def set_targets(self, targets: Iterable[str]) -> None:
        """Draft for the targets at these addresses (HOST:PORT) from now on, and for no others.

        Links to them that stand already are kept. A dropped link ends its stream, and its target's sessions continue
        without this draft.
        """
        wanted = list(dict.fromkeys(targets))
        for target in [target for target in self._links if target not in wanted]:
            self._links.pop(target)[1].cancel()
        for target in wanted:
            if target not in self._links:
                state = LinkState(target)
                self._links[target] = state, asyncio.create_task(self._keep(state))

    async def close(self) -> None:
        """Drop all links, and wait until their streams have ended."""
        tasks = [task for _, task in self._links.values()]
        self._links.clear()
        await end_tasks(*tasks)


async def keep_link(state: LinkState, access: PeerAccess, hello: Hello, drafter: Drafter, wake: asyncio.Event) -> None:
    """Dial a target, and draft for it while the stream stands; dial again when it breaks. Runs until cancelled."""
    last = ""
    while True:
        try:
            async with access.dial(state.target) as channel:
                await _speculate(channel, access, state, hello, drafter, wake)
        except grpc.aio.AioRpcError as error:
            state.refusal = error.details() or "" if error.code() in _REFUSALS else ""
            reason = f"{error.code().name} {error.details()}"
            if state.attached or reason != last:  # a target that is not there yet is dialled many times
                _log_broken(state, error.code(), reason)
            last = reason
        except (ServiceError, TimeoutError) as error:
            log.warning("stream to %s ended: %s", state.target, str(error) or "it does not answer the handshake")
        except Exception:
            log.exception("stream to %s failed; it is dialled again", state.target)
        finally:
            state.attached = ""
        await asyncio.sleep(_REDIAL_SECONDS)


def _log_broken(state: LinkState, code: grpc.StatusCode, reason: str) -> None:
    """Log that a target cannot be reached, or that its stream has broken."""
    if code is grpc.StatusCode.UNAVAILABLE and not state.attached:
        log.info("waiting until the target listens", extra={"target": state.target})
    else:
        log.warning("no stream to the target", extra={"target": state.target, "reason": reason})


async def _speculate(
    channel: grpc.aio.Channel, access: PeerAccess, state: LinkState, hello: Hello, drafter: Drafter, wake: asyncio.Event
) -> None:
    """Draft for a target until it ends the stream.

    Raises AioRpcError if the stream ends with an error, ServiceError for a message of the target that is not valid or
    if it hangs, TimeoutError if it does not answer the handshake.
    """
    call = speculation_pb2_grpc.SpeculationStub(channel).Speculate(metadata=access.metadata)
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
