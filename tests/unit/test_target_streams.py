"""The target's streams over gRPC: one session's error ends that session, and one peer's doings harm no other."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos import control_pb2, control_pb2_grpc, speculation_pb2, speculation_pb2_grpc
from specahead.engine.sampling.distributions import Sampling
from specahead.wire import convert
from specahead.wire import messages as m
from target_service.hooks import NO_HOOKS, Hooks
from target_service.service import Parts, serve
from tests.proposals import together
from tests.settings import target_settings
from tests.unit.fake_models import GREEDY, LAYERS, PLAN, VOCAB, FakeModel, FakeRunner, Logits

PROMPT = list(range(1, 21))
HELLO = m.Hello("draft", "any", VOCAB, "hash", PLAN.hash, 4, PLAN.block_size)


class SlowRunner(FakeRunner):
    """A step takes 10 ms, so that a session of some hundred tokens is there for a while."""

    def forward(self, inputs: Any) -> Any:
        time.sleep(0.01)
        return super().forward(inputs)


@contextlib.asynccontextmanager
async def target(logits: Logits | None = None, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a target in this process; ends the target at the end."""
    async with target_task(logits, **settings) as (channel, _):
        yield channel


@contextlib.asynccontextmanager
async def target_task(
    logits: Logits | None = None, **settings: Any
) -> AsyncIterator[tuple[grpc.aio.Channel, asyncio.Task[None]]]:
    """The same, and the task that serves: it is cancelled as SIGTERM does it."""
    async with target_at(logits, **settings) as (address, task), grpc.aio.insecure_channel(address) as channel:
        yield channel, task


@contextlib.asynccontextmanager
async def target_at(
    logits: Logits | None = None, hooks: Hooks = NO_HOOKS, **settings: Any
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """A target in this process for 30 s at most: its address, and the task that serves."""
    runner = SlowRunner(logits or FakeModel().target, False, LAYERS, 1, 400)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    fitting = target_settings(**({"gamma": 4, "max_context": 500} | settings))
    parts = Parts(hooks)
    hello = replace(HELLO, peer="a-target")
    service = serve(fitting, runner, PLAN, hello, lambda server: address.set_result(server.address), parts=parts)
    task = asyncio.create_task(service)
    try:
        async with asyncio.timeout(30):
            yield await address, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def opening(name: str, max_tokens: int = 300, sampling: Sampling = GREEDY) -> m.Open:
    return m.Open(name, PROMPT, len(PROMPT), max_tokens, [], sampling, m.Exactness.EXACT)


class Orchestrator:
    """One Serve stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = control_pb2_grpc.TargetControlStub(channel).Serve()

    async def send(self, request: m.ServeRequest) -> None:
        await self.call.write(convert.serve_request_to_pb(request))

    async def events(self) -> AsyncIterator[m.ServedEvent]:
        """What comes, but for beats and reports; this end says its own beats with each."""
        while (frame := await self.call.read()) is not grpc.aio.EOF:
            await self.call.write(convert.serve_request_to_pb(m.Beat()))
            for pb in frame.events:
                event = convert.served_event_from_pb(pb)
                if not isinstance(event, m.Beat | m.Report):
                    yield event

    async def report(self, wanted: Callable[[m.Report], bool]) -> m.Report:
        """The next report of that kind."""
        async with asyncio.timeout(5):
            while True:
                for pb in (await self.call.read()).events:
                    event = convert.served_event_from_pb(pb)
                    if isinstance(event, m.Report) and wanted(event):
                        return event

    async def outcome(self, name: str) -> m.ServedEvent:
        """The event that ends a session."""
        async for event in self.events():
            if isinstance(event, m.Closed) and event.session == name:
                return event
            if isinstance(event, m.Commit) and event.at.session == name and event.finish_reason:
                return event
        raise AssertionError("the stream ended")


class Draft:
    """One Speculate stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = speculation_pb2_grpc.SpeculationStub(channel).Speculate()
        self._come: deque[Any] = deque()

    async def attach(self) -> None:
        await self.call.write(speculation_pb2.DraftFrame(hello=convert.hello_to_pb(HELLO)))
        assert (await self.call.read()).WhichOneof("body") == "welcome"

    async def send(self, *events: m.DraftEvent) -> None:
        await self.call.write(convert.draft_events_to_pb(events))

    async def wait_for(self, kind: type, name: str) -> Any:
        while True:
            while self._come:
                event = self._come.popleft()
                session = getattr(event, "session", None) or getattr(getattr(event, "at", None), "session", None)
                if isinstance(event, kind) and session == name:
                    return event
            self._come += map(convert.target_event_from_pb, (await self.call.read()).batch.events)


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_only_who_opened_a_session_may_abort_it() -> None:
    async with target() as channel:
        ours, other = Orchestrator(channel), Orchestrator(channel)
        await ours.send(opening("a", 100))
        first = await anext(ours.events())
        assert isinstance(first, m.Commit)
        await other.send(m.Abort("a"))
        outcome = await ours.outcome("a")
        assert outcome.finish_reason is m.FinishReason.LENGTH


NAN = float("nan")
WRONG = [
    *(Sampling(1e-40), Sampling(NAN), Sampling(top_p=2.0), Sampling(min_p=1.5), Sampling(presence_penalty=NAN)),
    *(Sampling(repetition_penalty=0.0), Sampling(logit_bias={1: NAN}), Sampling(logit_bias={VOCAB: 1.0})),
]


@pytest.mark.parametrize("sampling", WRONG)
async def test_a_session_that_cannot_be_leaves_its_stream_to_the_others(sampling: Sampling) -> None:
    async with target() as channel:
        ours = Orchestrator(channel)
        await ours.send(opening("good", 30))
        await ours.send(opening("bad", 30, sampling))
        outcome = await ours.outcome("bad")
        assert outcome.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert isinstance(await ours.outcome("good"), m.Commit)


async def test_log_probabilities_come_with_their_tokens_and_the_prompts_once() -> None:
    """Beside stop tokens that the model does not have, which min_tokens need not mask."""
    async with target() as channel:
        ours = Orchestrator(channel)
        request = replace(opening("a", 6, Sampling(0.0, min_tokens=4)), stop_token_ids=[VOCAB, 2**31 - 1])
        await ours.send(replace(request, wants_logprobs=True, wants_prompt_logprobs=True, alternatives=2))
        events: list[m.Commit] = []
        async for event in ours.events():
            assert isinstance(event, m.Commit), event
            events.append(event)
            if event.finish_reason:
                break
        assert [len(event.logprobs) for event in events] == [len(event.tokens) for event in events]
        assert [len(event.prompt_logprobs) for event in events] == [len(PROMPT) - 1] + [0] * (len(events) - 1)
        assert all(len(item.top_ids) == len(item.top_logprobs) == 2 for event in events for item in event.logprobs)


async def test_a_wrong_event_ends_the_drafting_of_its_session_and_no_other() -> None:
    async with target() as channel:
        ours, draft = Orchestrator(channel), Draft(channel)
        await draft.attach()
        await ours.send(opening("a"))
        await ours.send(opening("b"))
        begin = await draft.wait_for(m.Begin, "a")
        await draft.send(together(m.Proposal(begin.at, PROMPT[-1], [VOCAB])))
        await draft.wait_for(m.End, "a")
        assert (await draft.wait_for(m.Begin, "a")).tokens[: len(PROMPT)] == PROMPT
        assert await draft.wait_for(m.Verdict, "b")
        assert isinstance(await ours.outcome("b"), m.Commit)


async def test_a_draft_that_does_not_read_is_sent_away() -> None:
    async with target(max_sessions=2, max_context=400) as channel:
        ours, draft = Orchestrator(channel), Draft(channel)
        await draft.attach()
        await ours.send(opening("a", 350))
        await draft.wait_for(m.Begin, "a")
        await draft.send(*[m.Resync("a")] * 20_000)  # each is answered by all tokens of the session
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await draft.wait_for(m.Refusal, "a")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(await ours.outcome("a"), m.Commit)


async def test_a_peer_holds_so_many_streams_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for each kind of stream; one that ends makes room."""
    monkeypatch.setattr("target_service.servicer.MOST_STREAMS", 2)
    async with target() as channel:
        ours, drafts = [Orchestrator(channel) for _ in range(2)], [Draft(channel) for _ in range(2)]
        for orchestrator, draft in zip(ours, drafts, strict=True):
            await orchestrator.send(m.Beat())
            await draft.attach()
        for refused in (Orchestrator(channel).call, Draft(channel).call):
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "holds 2 streams here, as many as a peer may" in await refused.details()
        await drafts[0].call.done_writing()
        await read_all(drafts[0].call)
        await Draft(channel).attach()


@pytest.mark.parametrize("kind", [Orchestrator, Draft])
async def test_a_peer_that_falls_silent_is_let_go(
    kind: Callable[[grpc.aio.Channel], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specahead.wire.streams.BEAT_SECONDS", 0.05)
    async with target() as channel:
        peer = kind(channel)
        if isinstance(peer, Draft):
            await peer.attach()
        else:
            await peer.send(opening("a"))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_all(peer.call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "has said nothing for 0.4 s" in (ended.value.details() or "")
        status = await control_pb2_grpc.TargetControlStub(channel).Status(control_pb2.StatusRequest())
        assert not status.attached
        assert status.gauges["sessions"] == 0


def no_numbers_behind_30(tokens: list[int]) -> Any:
    """Return the model's logits, or NaN once a text that begins with token 30 has more than 25 tokens."""
    return FakeModel().target(tokens) * (float("nan") if tokens[0] == 30 and len(tokens) > 25 else 1)


async def test_logits_that_are_no_numbers_end_their_session_and_no_other() -> None:
    async with target(logits=no_numbers_behind_30) as channel:
        ours = Orchestrator(channel)
        await ours.send(opening("good", 40))
        await ours.send(replace(opening("bad", 40), tokens=[30, *PROMPT[1:]]))
        outcome = await ours.outcome("bad")
        assert outcome.code == grpc.StatusCode.INTERNAL.value[0]
        assert "NaN" in outcome.message
        good = await ours.outcome("good")
        assert good.finish_reason is m.FinishReason.LENGTH
        await ours.send(replace(opening("same prompt", 2), tokens=[30, *PROMPT[1:]]))
        first = await anext(ours.events())
        assert isinstance(first, m.Commit) and first.cached_tokens == 0, "its KV is met by nobody"
        await ours.send(opening("good again", 2))
        async for event in ours.events():
            if isinstance(event, m.Commit) and event.at.session == "good again":
                assert event.cached_tokens == 16
                break


async def test_a_peer_that_departs_in_the_middle_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    async with target() as channel:
        ours, draft = Orchestrator(channel), Draft(channel)
        await draft.attach()
        for name in ("a", "b", "c"):
            await ours.send(opening(name))
        await anext(ours.events())
        draft.call.cancel()
        ours.call.cancel()
        status = control_pb2_grpc.TargetControlStub(channel).Status
        async with asyncio.timeout(5):
            while (found := await status(control_pb2.StatusRequest())).gauges["sessions"] or found.attached:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def finish(ours: Orchestrator) -> None:
    await ours.send(opening("a", 3))
    assert isinstance(await ours.outcome("a"), m.Commit)


async def be_refused(ours: Orchestrator) -> None:
    """The name is closed while it is open on this stream: by logits that are no numbers."""
    await ours.send(replace(opening("a", 40), tokens=[30, *PROMPT[1:]]))
    assert isinstance(await ours.outcome("a"), m.Closed)


async def take_back(ours: Orchestrator) -> None:
    await ours.send(opening("a"))
    await anext(ours.events())
    await ours.send(m.Abort("a"))


@pytest.mark.parametrize("end", [finish, be_refused, take_back])
async def test_a_name_that_was_used_is_anothers_next(end: Callable[[Orchestrator], Any]) -> None:
    """A stream that ends aborts what it has open, and not what another has opened under a name that it had."""
    async with target(no_numbers_behind_30) as channel:
        ours, other = Orchestrator(channel), Orchestrator(channel)
        await end(ours)
        status = control_pb2_grpc.TargetControlStub(channel).Status
        while (await status(control_pb2.StatusRequest())).gauges["sessions"]:
            await asyncio.sleep(0.01)
        await other.send(opening("a"))
        events = other.events()
        await anext(events)
        ours.call.cancel()
        for _ in range(40):
            event = await anext(events)
            assert isinstance(event, m.Commit) and not event.finish_reason


async def test_a_target_that_stops_tells_every_session_that_it_is_unavailable() -> None:
    """Those that run and those that wait: the orchestrator then keeps them for the next target."""
    async with target_task(max_sessions=1) as (channel, serving):
        ours = Orchestrator(channel)
        await ours.send(opening("runs"))
        await ours.send(opening("waits"))
        await anext(ours.events())
        serving.cancel()
        closed = {}
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for event in ours.events():
                if isinstance(event, m.Closed):
                    closed[event.session] = event.code
        assert closed == dict.fromkeys(("runs", "waits"), grpc.StatusCode.UNAVAILABLE.value[0])


@pytest.mark.parametrize("first", [speculation_pb2.DraftFrame(), convert.draft_events_to_pb([m.Resync("a")])])
async def test_a_draft_that_does_not_say_hello_is_refused(first: speculation_pb2.DraftFrame) -> None:
    async with target() as channel:
        draft = speculation_pb2_grpc.SpeculationStub(channel).Speculate()
        await draft.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read_all(draft)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "field", ["protocol_version", "vocab_size", "tokenizer_hash", "plan_hash", "gamma", "block_size"]
)
async def test_a_draft_that_does_not_fit_is_refused_naming_both_sides(field: str) -> None:
    """One that fits is welcome afterwards."""
    right: Any = getattr(HELLO, field)
    wrong = "0123456789abcdef" if isinstance(right, str) else right + 1
    async with target() as channel:
        draft = speculation_pb2_grpc.SpeculationStub(channel).Speculate()
        hello = replace(HELLO, peer="a-draft", **{field: wrong})
        await draft.write(speculation_pb2.DraftFrame(hello=convert.hello_to_pb(hello)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read_all(draft)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        said = refused.value.details() or ""
        assert all(part in said for part in (field, "a-draft", "a-target", str(wrong), str(right))), said
        await Draft(channel).attach()


async def test_a_frame_that_names_no_session_ends_its_stream_and_no_other() -> None:
    async with target() as channel:
        ours, other = Orchestrator(channel), Orchestrator(channel)
        await ours.send(opening("a", 30))
        await other.call.write(control_pb2.ServeFrame())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read_all(other.call)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(await ours.outcome("a"), m.Commit)
