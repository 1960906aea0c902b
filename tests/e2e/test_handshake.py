"""A draft and a target that do not fit refuse each other and name both sides; the target continues."""

import asyncio
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import control_pb2, control_pb2_grpc, speculation_pb2, speculation_pb2_grpc
from specahead.engine.loading.tokenizer import load_tokenizer, tokenizer_hash
from specahead.engine.sampling.distributions import Sampling
from specahead.models import DRAFT, PLAN, TARGET
from specahead.sparsity.announce import BY_TARGET_HEAD
from specahead.sparsity.plan import load_plan
from specahead.sparsity.selection import BlockSelection
from specahead.wire import convert
from specahead.wire.messages import (
    At,
    Beat,
    Begin,
    Closed,
    Commit,
    End,
    Exactness,
    Hello,
    Open,
    Proposal,
    Proposals,
    Ready,
    Report,
    Support,
    Verdict,
)
from specahead.wire.selection_codec import encode_selection
from tests.client import APPROXIMATE, generate, wait_for
from tests.proposals import together
from tests.stack import start_service, start_stack


def start_draft(target: str, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """Start a real draft that dials a target."""
    own = ("--model", str(DRAFT), "--plan", str(PLAN), "--port", "0", "--kv-tokens", "1000")
    return start_service("-m", "draft_service", *own, "--target", target, *flags)


@pytest.fixture(scope="module")
def bare_target() -> Iterator[str]:
    """A target without a draft; the tests are its drafts."""
    process, address = start_service(
        "-m", "target_service", "--model", str(TARGET), "--plan", str(PLAN), "--kv-tokens", "2000", "--port", "0"
    )  # fmt: skip
    yield address
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def hello() -> Hello:
    plan = load_plan(PLAN)
    return Hello(
        "a-draft", "specahead/models/a-draft", 4096, tokenizer_hash(load_tokenizer(str(TARGET))), plan.hash, 4, 16
    )


async def _shake(target: str, hello: Hello) -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(target) as channel:
        call = speculation_pb2_grpc.SpeculationStub(channel).Speculate()
        await call.write(speculation_pb2.DraftFrame(hello=convert.hello_to_pb(hello)))
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        return await call.code(), await call.details()


@pytest.mark.parametrize(
    "field", ["protocol_version", "vocab_size", "tokenizer_hash", "plan_hash", "gamma", "block_size"]
)
async def test_mismatch_is_refused_naming_both_sides(bare_target: str, hello: Hello, field: str) -> None:
    wrong: Any = "0123456789abcdef" if isinstance(getattr(hello, field), str) else getattr(hello, field) + 1
    code, details = await _shake(bare_target, replace(hello, **{field: wrong}))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert field in details
    assert "a-draft" in details
    assert "target" in details
    assert str(wrong) in details
    assert str(getattr(hello, field)) in details


async def test_a_fitting_hello_is_welcome(bare_target: str, hello: Hello) -> None:
    assert (await _shake(bare_target, hello))[0] is grpc.StatusCode.OK


def test_a_real_draft_reports_its_refusal(bare_target: str) -> None:
    """A draft with another γ reports why it was refused; the target continues."""
    draft, address = start_draft(bare_target, "--speculation", '{"gamma": 7}')
    try:
        with grpc.insecure_channel(address) as channel:
            stub = control_pb2_grpc.DraftControlStub(channel)
            refusal = ""

            def refused() -> bool:
                nonlocal refusal
                refusal = stub.Status(control_pb2.StatusRequest()).refusal
                return bool(refusal)

            wait_for(refused, 60, "the refusal is told")
            assert "gamma" in refusal
            assert "7" in refusal
    finally:
        draft.kill()
        draft.wait()


# Events that a hostile or broken draft may send. Each must end the drafting of its session, and nothing else.
PROMPT = list(range(300, 364))


def _selection(plan_heads: int, blocks: int = 4) -> bytes:
    return encode_selection(BlockSelection.from_lists([[1]] * plan_heads, blocks))


def _announcing(at: At, selection: bytes) -> Proposals:
    return together(Proposal(at, PROMPT[-1], [5]), selection=selection)


def _support(token: int, probability: float) -> Support:
    import numpy as np

    return Support(np.array([token, token + 1]), np.array([probability, 1 - probability], dtype=np.float32))


HEADS = BY_TARGET_HEAD.rows(load_plan(PLAN))  # of the bundled plan's default method
BAD_EVENTS = {
    "indices out of range": lambda at: _announcing(at, _selection(HEADS, 5)),
    "heads the plan does not have": lambda at: _announcing(at, _selection(HEADS + 1)),
    "garbage announcement": lambda at: _announcing(at, b"\x03\x00\xff\xff\xff\xff\xff\xff"),
    "2^31 blocks": lambda at: _announcing(at, struct.pack("<4IQIQ", 4, 0, HEADS, 2**31, 0, 0, 0)),
    "empty proposal": lambda at: together(Proposal(at, 0, [])),
    "too many tokens": lambda at: together(Proposal(at, 0, [1] * 5)),
    "token outside the vocabulary": lambda at: together(Proposal(at, 0, [4096])),
    "token 2^32 - 1": lambda at: together(Proposal(at, 0, [2**32 - 1])),
    "NaN probability": lambda at: together(Proposal(at, 0, [5], [_support(5, float("nan"))])),
    "negative probability": lambda at: together(Proposal(at, 0, [5], [_support(5, -0.5)])),
    "impossible token": lambda at: together(Proposal(at, 0, [5], [_support(9, 0.5)])),
    "wrong base": lambda at: together(Proposal(at._replace(base=at.base - 1), 0, [5])),
    "base 2^31": lambda at: together(Proposal(at._replace(base=2**31), 0, [5])),
    "NaN time": lambda at: together(Proposal(at, 0, [5], [], float("nan"))),
    "no session": lambda at: Ready(At("", 0, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_EVENTS)
async def test_a_broken_draft_loses_its_session_and_no_token(hello: Hello, bare_target: str, what: str) -> None:
    """A session of a draft that misbehaves is decoded plainly to its end; the target and the stream survive."""
    async with grpc.aio.insecure_channel(bare_target) as channel:
        draft = speculation_pb2_grpc.SpeculationStub(channel).Speculate()
        await draft.write(speculation_pb2.DraftFrame(hello=convert.hello_to_pb(hello)))
        await draft.read()
        serve = control_pb2_grpc.TargetControlStub(channel).Serve()
        sampling = Sampling(1.0, 1.0, 3) if "probability" in what or "impossible" in what else Sampling(0.0, 1.0, 3)
        name = f"session-{what}"
        opening = Open(name, PROMPT, len(PROMPT), 8, [], sampling, Exactness.APPROXIMATE)
        await serve.write(convert.serve_request_to_pb(opening))
        while (begin := await _next(draft, Begin)).at.session != name:
            pass
        assert begin.tokens == PROMPT
        await draft.write(convert.draft_events_to_pb([BAD_EVENTS[what](begin.at)]))
        committed = 0
        async with asyncio.timeout(60):
            while committed < 8:
                for pb in (await serve.read()).events:
                    event = convert.served_event_from_pb(pb)
                    assert isinstance(event, Commit | Beat | Report)
                    committed += len(event.tokens) if isinstance(event, Commit) else 0
            if what == "no session":
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await _next(draft, End)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert refused.value.details()
            else:
                # Sessions that the draft of an earlier case left may end in between.
                while (await _next(draft, End)).session != name:
                    pass
                await serve.write(convert.serve_request_to_pb(replace(opening, session=f"another-{what}")))
                assert (await _next(draft, Begin)).at.session == f"another-{what}"
        await serve.done_writing()


async def _next(draft: Any, kind: type) -> Any:
    """Return the next event of this kind, past beats and verdicts."""
    while True:
        events = map(convert.target_event_from_pb, (await draft.read()).batch.events)
        for event in events:
            if isinstance(event, kind):
                return event
            assert isinstance(event, Beat | Verdict)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [], "prompt_tokens": 0}, "prompt tokens"),
        ({"tokens": [4096]}, "vocabulary"),
        ({"tokens": [1] * 50_000, "prompt_tokens": 50_000}, "context"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "context"),
        ({"tokens": [1] * 1900, "prompt_tokens": 1900, "max_tokens": 200}, "pages"),
    ],
)
async def test_the_target_refuses_what_it_cannot_run(bare_target: str, change: dict[str, Any], reason: str) -> None:
    opening = replace(Open("s", [1], 1, 4, [], Sampling(0.0), Exactness.EXACT), **change)
    async with grpc.aio.insecure_channel(bare_target) as channel, asyncio.timeout(60):
        serve = control_pb2_grpc.TargetControlStub(channel).Serve()
        await serve.write(convert.serve_request_to_pb(opening))
        closed = None
        while closed is None:
            events = map(convert.served_event_from_pb, (await serve.read()).events)
            closed = next((event for event in events if isinstance(event, Closed)), None)
        assert closed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert reason in closed.message
        await serve.done_writing()


def test_a_pair_without_a_plan_serves_and_says_so(tmp_path: Path) -> None:
    """Each service knows the other's model. `exact` needs no plan; `approximate` reads everything and reports that."""
    for name, model in (("target", TARGET), ("draft", DRAFT)):
        shutil.copytree(model, tmp_path / name)
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    common = ("--port", "0", "--kv-tokens", "4000")
    targets, address = start_service("-m", "target_service", "--model", target, "--draft", draft, *common)
    drafts, draft_address = start_service(
        "-m", "draft_service", "--model", draft, "--target-model", target, "--target", address, *common
    )
    pair = ("--target", target, "--draft", draft)
    gateway = start_stack("--target-address", address, "--draft-address", draft_address, *pair)
    try:
        exact = generate(gateway.stub(), "The old man said", max_tokens=20).speculation
        approximate = generate(gateway.stub(), "The old man " * 400, max_tokens=20, exactness=APPROXIMATE).speculation
        assert exact.accepted > 0 and not exact.uncalibrated
        assert approximate.accepted > 0 and approximate.kv_read_fraction == 1 and approximate.uncalibrated
    finally:
        gateway.stop()
        for process in (targets, drafts):
            process.kill()
            process.wait()


def test_the_target_still_works(bare_target: str) -> None:
    """A good draft is still accepted after all the refusals above."""
    draft, address = start_draft(bare_target)
    try:
        gateway = start_stack("--target-address", bare_target, "--draft-address", address)
        try:
            assert generate(gateway.stub(), "The old man said", max_tokens=20).speculation.accepted > 0
        finally:
            gateway.stop()
    finally:
        draft.kill()
        draft.wait()
