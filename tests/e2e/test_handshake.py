"""Services of a pair without a plan, started one by one: which drafts the target takes, and what it serves by them."""

import shutil
from pathlib import Path

import grpc

from protos import control_pb2, control_pb2_grpc
from specahead.models import DRAFT, TARGET
from tests.client import APPROXIMATE, generate, wait_for
from tests.stack import start_service, start_stack


def test_a_pair_without_a_plan_serves_and_says_so(tmp_path: Path) -> None:
    """Each service knows the other's model. `exact` needs no plan; `approximate` reads everything and reports that. A
    draft with another γ reports why it was refused, and the target continues.
    """
    for name, model in (("target", TARGET), ("draft", DRAFT)):
        shutil.copytree(model, tmp_path / name)
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    common = ("--port", "0", "--kv-tokens", "4000")
    targets, address = start_service("-m", "target_service", "--model", target, "--draft", draft, *common)
    dialling = ("-m", "draft_service", "--model", draft, "--target-model", target, "--target", address, *common)
    others, other_address = start_service(*dialling, "--speculation", '{"gamma": 7}')
    with grpc.insecure_channel(other_address) as channel:
        stub = control_pb2_grpc.DraftControlStub(channel)
        said = lambda: stub.Status(control_pb2.StatusRequest()).refusal  # noqa: E731
        wait_for(lambda: bool(said()), 60, "the refusal is told")
        assert "gamma" in said() and "7" in said()
    others.terminate()
    drafts, draft_address = start_service(*dialling)
    pair = ("--target", target, "--draft", draft)
    gateway = start_stack("--target-address", address, "--draft-address", draft_address, *pair)
    try:
        exact = generate(gateway.stub(), "The old man said", max_tokens=20).speculation
        approximate = generate(gateway.stub(), "The old man " * 400, max_tokens=20, exactness=APPROXIMATE).speculation
        assert exact.accepted > 0 and not exact.uncalibrated
        assert approximate.accepted > 0 and approximate.kv_read_fraction == 1 and approximate.uncalibrated
    finally:
        gateway.stop()
        for process in (targets, drafts, others):
            process.kill()
            process.wait()
