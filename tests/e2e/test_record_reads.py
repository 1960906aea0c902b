"""What a target records of its reads is what it says to clients that it read."""

import itertools
from pathlib import Path

import pytest

from models import PLAN
from sparsity.announce import summary_tokens
from sparsity.plan import load_plan
from target_service.recording import load_reads
from tests.client import APPROXIMATE, EXACT, generate
from tests.stack import start_gateway, start_services

TEXT = " ".join(f"It was the year {1800 + i}, and in the town nothing had changed." for i in range(60))
TARGET = "import sys; from target_service.__main__ import main; sys.argv += ['--record-reads', sys.argv.pop(1)]; main()"


@pytest.mark.parametrize("sparsity", ["ahead", "oracle"])
def test_a_recording_agrees_with_its_sessions_summary(tmp_path: Path, sparsity: str) -> None:
    file = tmp_path / "reads.npz"
    services = start_services("--budget", "0.2", target_command=("-c", TARGET, str(file)))
    gateway = start_gateway(services, "--budget", "0.2")
    try:
        stub = gateway.stub()
        generate(stub, TEXT, max_tokens=8, exactness=EXACT)  # not recorded
        fields = {"max_tokens": 40, "exactness": APPROXIMATE, "sparsity": sparsity, "request_id": "one"}
        result = generate(stub, TEXT, ignore_eos=True, **fields)
    finally:
        gateway.stop()
        services.stop()  # by SIGTERM
    (session,) = load_reads(file)
    summary, reads, plan = result.speculation, session.reads, load_plan(PLAN)
    assert session.session == "one"
    assert [read.at.round for read in reads] == list(range(summary.rounds))
    assert sum(read.accepted for read in reads) == summary.accepted
    bases = [read.at.base for read in reads]
    grown = [after - before for before, after in itertools.pairwise(bases)]
    assert grown == [read.accepted + 1 for read in reads[:-1]]
    rows = plan.target_layers * plan.target_kv_heads
    read_tokens = total = 0.0
    for read in reads:
        assert read.blocks.num_heads == rows and read.blocks.matrix()[:, 0].all()  # the sinks
        summaries = summary_tokens(plan, read.at.base) if sparsity == "ahead" else 0.0
        read_tokens += read.blocks.count(0, read.blocks.num_blocks) * plan.block_size + rows * summaries
        total += rows * read.blocks.num_blocks * plan.block_size
    assert summary.kv_read_fraction == pytest.approx(read_tokens / total, abs=1e-4)
