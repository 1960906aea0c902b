"""Recorded reads come back from their file as they were, and what cannot be recorded is refused at once."""

from pathlib import Path

import pytest
import torch

from specahead.lab.benchmarks.recording import ReadRecording, load_reads
from specahead.wire.messages import At


def chosen(blocks: int, seed: int) -> torch.Tensor:
    return torch.rand(3, 2, blocks, generator=torch.Generator().manual_seed(seed)) < 0.3


def test_sessions_come_back_from_their_file(tmp_path: Path) -> None:
    recording = ReadRecording(str(tmp_path / "reads"))
    first = [(At("a", 0, 0, 1000), 4, chosen(63, 0)), (At("a", 0, 2, 1005), 1, chosen(65, 1))]
    other = [(At("b/ü", 3, 1, 30), 0, chosen(2, 2))]
    again = [(At("a", 7, 0, 1000), 2, chosen(128, 3))]  # the name once more
    for rounds in (first[:1], other, first[1:], again):
        for at, accepted, blocks in rounds:
            recording.add(at, accepted, blocks)
    recording.save()
    sessions = load_reads(tmp_path / "reads")
    assert [session.session for session in sessions] == ["a", "b/ü", "a"]
    for session, rounds in zip(sessions, (first, other, again), strict=True):
        for read, (at, accepted, blocks) in zip(session.reads, rounds, strict=True):
            assert (read.at, read.accepted) == (at, accepted)
            assert (read.blocks.matrix() == blocks.flatten(0, 1).numpy()).all()
            assert read.blocks.num_blocks == blocks.shape[2]


def test_nothing_recorded_is_a_file_too(tmp_path: Path) -> None:
    ReadRecording(str(tmp_path / "reads.npz")).save()
    assert load_reads(tmp_path / "reads.npz") == []


@pytest.mark.parametrize("name", ["missing/reads.npz", "."])
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="expected a file in a folder"):
        ReadRecording(str(tmp_path / name))
