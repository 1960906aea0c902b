"""Traces of requests as Mooncake publishes them (FAST25-release/traces, kvcache-ai/Mooncake, Apache-2.0).

A line has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt;
equal ids stand for equal prefixes.
"""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 512  # tokens of a hash
_DIGIT = 4000  # base in which hashes are written as tokens


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace."""

    at: float
    """Seconds since the trace began."""
    prompt_tokens: int
    answer_tokens: int
    blocks: list[int]
    """Hashes of the prompt's blocks."""

    def prompt(self, scale: int) -> list[int]:
        """Return a prompt `scale` times shorter. Two prompts share a prefix of blocks if their requests do."""
        length = BLOCK // scale
        tokens = [token for hash in self.blocks for token in _block(hash, length)]
        return tokens[: max(1, self.prompt_tokens // scale)]


def _block(hash: int, length: int) -> list[int]:
    head = [hash % _DIGIT, hash // _DIGIT % _DIGIT]
    return head + [(hash + place) % _DIGIT for place in range(length - len(head))]


def load_requests(file: Path, most: int = 0) -> list[TracedRequest]:
    """Return the requests of a trace, .jsonl or .jsonl.xz; the first `most` of them, 0: all.

    Raises OSError if there is no such file, ValueError for what is no trace.
    """
    with lzma.open(file, "rt") if file.suffix == ".xz" else file.open() as lines:
        try:
            read = [_request(json.loads(line)) for line, _ in zip(lines, range(most or 1 << 62), strict=False)]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: a line without {error}, which a trace of requests has") from None
    if not read:
        raise ValueError(f"{file}: no request in it")
    return read


def _request(line: dict[str, Any]) -> TracedRequest:
    return TracedRequest(line["timestamp"] / 1000, line["input_length"], line["output_length"], line["hash_ids"])
