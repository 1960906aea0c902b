"""What a target records of its reads is what it says to clients that it read."""

import itertools
from pathlib import Path

import pytest

from benchmarks.recording import SessionReads, load_reads
from models import PLAN
from protos import inference_pb2
from sparsity.announce import summary_tokens
from sparsity.plan import load_plan
from tests.client import APPROXIMATE, EXACT, generate
from tests.stack import start_gateway, start_services

TEXT = " ".join(f"It was the year {1800 + i}, and in the town nothing had changed." for i in range(60))
TARGET = "import sys; from target_service.__main__ import main; sys.argv += ['--record-reads', sys.argv.pop(1)]; main()"


def test_a_recording_agrees_with_its_sessions_summaries(tmp_path: Path) -> None:
    """Of a method whose blocks are known before a pass, and of one whose pass shares out a budget."""
    file = tmp_path / "reads.npz"
    services = start_services("--budget", "0.2", target_command=("-c", TARGET, str(file)))
    gateway = start_gateway(services, "--budget", "0.2")
    try:
        stub = gateway.stub()
        generate(stub, TEXT, max_tokens=8, exactness=EXACT)  # not recorded
        summaries = {}
        for name in ("ahead", "pillar"):
            fields = {"exactness": APPROXIMATE, "sparsity": name, "request_id": name, "ignore_eos": True}
            summaries[name] = generate(stub, TEXT, max_tokens=40, **fields).speculation
    finally:
        gateway.stop()
        services.stop()  # by SIGTERM
    sessions = load_reads(file)
    assert [session.session for session in sessions] == ["ahead", "pillar"]
    for session in sessions:
        _check(session, summaries[session.session])


def _check(session: SessionReads, summary: inference_pb2.SpeculationSummary) -> None:
    reads, plan = session.reads, load_plan(PLAN)
    assert [read.at.round for read in reads] == list(range(summary.rounds))
    assert sum(read.accepted for read in reads) == summary.accepted
    bases = [read.at.base for read in reads]
    grown = [after - before for before, after in itertools.pairwise(bases)]
    assert grown == [read.accepted + 1 for read in reads[:-1]]
    rows = plan.target_layers * plan.target_kv_heads
    tokens = total = 0.0
    for read in reads:
        assert read.blocks.num_heads == rows and read.blocks.matrix()[:, 0].all()  # the sinks
        means = summary_tokens(plan, read.at.base) if session.session == "ahead" else 0.0
        tokens += read.blocks.count(0, read.blocks.num_blocks) * plan.block_size + rows * means
        total += rows * read.blocks.num_blocks * plan.block_size
    assert summary.kv_read_fraction == pytest.approx(tokens / total, abs=1e-4)
