"""`specahead generate`: continue a prompt on a running server."""

import argparse
import dataclasses
import json
import os
import sys
from functools import partial
from pathlib import Path

from orchestrator.api.client import Generation, generate
from specahead.wire.tls import Tls, read_tls


def run(flags: argparse.Namespace) -> None:
    """Print the text as it comes, or one JSON object. Raises ValueError for flags, grpc.RpcError for the request."""
    prompt = _read_prompt(flags)
    for name, value, bits in (("--max-tokens", flags.max_tokens, 32), ("--seed", flags.seed, 64)):
        if value is not None and not 0 <= value < 2**bits:
            raise ValueError(f"{name} must lie in [0, 2^{bits}), got {value}")

    result = generate(
        flags.address,
        prompt,
        model=flags.model,
        api_key=flags.api_key or os.environ.get("SPECAHEAD_API_KEY", ""),
        tls=read_tls("", "", flags.tls_ca) if flags.tls_ca else Tls() if flags.tls else None,
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
        stop=flags.stop,
        exactness=flags.exactness,
        sparsity=flags.sparsity,
        on_text=None if flags.json else partial(print, end="", flush=True),
    )
    print(json.dumps(_to_json(result)) if flags.json else "")


def _read_prompt(flags: argparse.Namespace) -> str:
    if flags.prompt is not None:
        return flags.prompt
    try:
        if flags.prompt_file is not None:
            return Path(flags.prompt_file).read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flags.prompt_file or 'standard input'} is not UTF-8 text: {error}") from None


def _to_json(result: Generation) -> dict[str, object]:
    content = dataclasses.asdict(result)
    content["usage"] = {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "total_tokens": result.prompt_tokens + len(result.token_ids),
    }
    return content
