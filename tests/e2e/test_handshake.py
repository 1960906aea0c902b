"""A draft and a target that do not fit refuse each other and name both sides; the target continues."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import control_pb2, control_pb2_grpc, speculation_pb2, speculation_pb2_grpc
from specahead.engine.loading.tokenizer import load_tokenizer, tokenizer_hash
from specahead.models import DRAFT, PLAN, TARGET
from specahead.sparsity.plan import load_plan
from specahead.wire import convert
from specahead.wire.messages import Hello
from tests.client import APPROXIMATE, generate, wait_for
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


async def test_a_fitting_hello_is_welcome_after_all_refusals(bare_target: str, hello: Hello) -> None:
    assert (await _shake(bare_target, hello))[0] is grpc.StatusCode.OK


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
