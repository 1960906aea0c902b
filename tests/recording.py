"""`python -m tests.recording`: a target service that records what the rounds of approximate sessions read.

Each round takes one bit of memory for each (layer, KV head, block) while the service runs. The file is written when
the service stops.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specahead.config import TargetSettings, resolve_service
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import At, Commit
from specahead.wire.server import run_service
from specahead.wire.session_names import name_of_client
from target_service import committing, opening
from target_service.commit import commit_round
from target_service.service import run
from target_service.verify_step import VerifyRound

_NUMBERS = ("rounds", "epochs", "bases", "accepted", "blocks")  # arrays of a session, int64 [rounds]


@dataclass(frozen=True)
class Read:
    """The blocks that a round read."""

    at: At
    """Where the round began. Rounds of one epoch follow verdicts that the draft foresaw."""
    accepted: int
    """Drafted tokens that were kept."""
    blocks: BlockSelection
    """A row for each (layer, KV head), layer by layer."""


@dataclass
class SessionReads:
    """The rounds of a session whose blocks were chosen, in order; rounds that read everything are not among them."""

    session: str
    reads: list[Read] = field(default_factory=list)


class ReadRecording:
    """Takes rounds as they are committed. Raises OSError at once if nothing could be written to `file` later."""

    def __init__(self, file: str) -> None:
        folder = Path(file).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
            raise OSError(f"cannot record reads to {file}: expected a file in a folder that can be written")
        self._file = file
        self._sessions: list[SessionReads] = []
        self._latest: dict[str, SessionReads] = {}

    def add(self, at: At, accepted: int, chosen: Tensor) -> None:
        """Take a round. chosen: the blocks that it read, bool [layers, kv_heads, blocks]."""
        latest = self._latest.get(at.session)
        if latest is None or at.round <= latest.reads[-1].at.round:  # a name can be used again
            latest = self._latest[at.session] = SessionReads(at.session)
            self._sessions.append(latest)
        blocks = BlockSelection.from_matrix(chosen.flatten(0, 1).numpy())
        latest.reads.append(Read(at, accepted, blocks))

    def watch_rounds(self) -> None:
        """Have all targets of this process report the blocks that sparse rounds read, and record them."""

        def commit_and_record(item: VerifyRound, *given: Any) -> tuple[Commit, bool]:
            commit, known = commit_round(item, *given)
            reader = item.session.reading.reader
            if reader is not None and reader.is_sparse:
                self.add(commit.at, commit.accepted, reader.chosen.cpu())
            return commit, known

        opening.Reader = partial(Reader, report_blocks=True)
        committing.commit_round = commit_and_record

    def save(self) -> None:
        """Write all rounds to the file."""
        save_reads(self._sessions, self._file)


def save_reads(sessions: list[SessionReads], file: str) -> None:
    """Write recordings as .npz: for session i the words of its blocks (`i bits`, uint64 [rounds, rows, words]), and its
    numbers by name.
    """
    arrays: dict[str, np.ndarray] = {}
    for i, session in enumerate(sessions):
        widest = max(read.blocks.num_blocks for read in session.reads)
        arrays[f"{i} bits"] = np.stack([read.blocks.resized(widest).words for read in session.reads])
        numbers = np.array(
            [(r.at.round, r.at.epoch, r.at.base, r.accepted, r.blocks.num_blocks) for r in session.reads]
        )
        arrays |= {f"{i} {name}": numbers[:, k] for k, name in enumerate(_NUMBERS)}
    names = np.frombuffer(json.dumps([name_of_client(session.session) for session in sessions]).encode(), np.uint8)
    with open(file, "wb") as out:  # by name, NumPy would add an ending
        np.savez_compressed(out, allow_pickle=False, sessions=names, **arrays)  # type: ignore[arg-type]


def load_reads(file: str | Path) -> list[SessionReads]:
    """Return what a service has recorded, sessions in the order of their first sparse rounds."""
    with np.load(file, allow_pickle=False) as content:
        names = json.loads(content["sessions"].tobytes())
        return [SessionReads(name, _session_reads(content, i, name)) for i, name in enumerate(names)]


def _session_reads(content: "np.lib.npyio.NpzFile", i: int, name: str) -> list[Read]:
    bits = content[f"{i} bits"]
    columns = [content[f"{i} {key}"].tolist() for key in _NUMBERS]
    reads = []
    for words, (round_, epoch, base, accepted, blocks) in zip(bits, zip(*columns, strict=True), strict=True):
        full = BlockSelection(words.shape[0], words.shape[1] * 64, words)
        reads.append(Read(At(name, epoch, round_, base), accepted, full.resized(blocks)))
    return reads


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.recording", description=__doc__)
    parser.add_argument("--record-reads", required=True, metavar="FILE")
    settings, flags = resolve_service(parser, TargetSettings(port=50052), sys.argv[1:], os.environ)
    settings = replace(settings, draft_timeout=60.0)  # plain rounds are in no recording: a busy machine, too, waits
    recording = ReadRecording(flags.record_reads)
    recording.watch_rounds()
    try:
        run_service(settings, lambda on_ready: run(settings, on_ready))
    finally:
        recording.save()


if __name__ == "__main__":
    main()
