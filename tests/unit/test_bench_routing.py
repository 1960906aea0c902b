"""The routing benchmark runs over a small trace, and says of it what can be known."""

import json
import lzma
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specahead.lab.benchmarks import routing
from specahead.lab.benchmarks.request_trace import read_trace


def write(file: Path, requests: list[dict[str, Any]]) -> Path:
    with lzma.open(file, "wt") as lines:
        lines.writelines(json.dumps(request) + "\n" for request in requests)
    return file


def talks(count: int, turns: int) -> list[dict[str, Any]]:
    """Conversations side by side: each turn's prompt begins with the prompt before it."""
    return [
        {
            "timestamp": 4000 * turn + 100 * talk,
            "input_length": 512 * (2 + turn),
            "output_length": 80,
            "hash_ids": [1000 * talk + block for block in range(2 + turn)],
        }
        for turn in range(turns)
        for talk in range(count)
    ]


def flags(trace: Path, **others: Any) -> Namespace:
    given = {"trace": str(trace), "requests": 0, "speed": [1.0]}
    sizes = {"targets": 4, "drafts": 2, "kv_tokens": 200_000, "scale": 16, "json": None}
    return Namespace(**given | sizes | others)


def test_prefixes_are_found_by_who_looks_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five conversations over four targets: nearly all turns go where their last one was."""
    trace = write(tmp_path / "trace.jsonl.xz", talks(5, 6))
    (row,) = routing.run(flags(trace, json=str(tmp_path / "rows.json")))
    known = sum(512 * (1 + turn) for turn in range(1, 6)) / sum(512 * (2 + turn) for turn in range(6))
    assert row.requests == 30 and row.first_token_p50 <= row.first_token_p99
    assert 0.9 * known < row.hit_rate <= known
    assert json.loads((tmp_path / "rows.json").read_text()) == [asdict(row)]
    assert f"{row.hit_rate:.1%}" in capsys.readouterr().out


def test_a_prompt_shares_with_others_what_its_hashes_say(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path / "trace.jsonl.xz", talks(2, 1)))
    longer = read_trace(write(tmp_path / "longer.jsonl.xz", talks(1, 2)))[-1]
    prompt = first.prompt(16)
    assert len(prompt) == 64 and longer.prompt(16)[:64] == prompt
    assert second.prompt(16)[:32] != prompt[:32]
    assert max(prompt) < 4096
