"""`specahead generate`: continue a prompt on a running server."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from specahead.cli.flags import asked_sampling
from specahead.cli.server import Server


def run(flags: argparse.Namespace) -> None:
    """Print the text as it comes, or one JSON object. Raises ValueError for a refusal of the server or a prompt that
    is not UTF-8, OSError if the server does not answer."""
    body = {"prompt": _read_prompt(flags), "stop": flags.stop} | asked_sampling(flags)
    show: Callable[[str], object] = (lambda text: None) if flags.json else partial(print, end="", flush=True)
    answer = continue_text(Server(flags), body, show)
    print(json.dumps(answer) if flags.json else "")


def continue_text(server: Server, body: dict[str, Any], show: Callable[[str], object]) -> dict[str, Any]:
    """Return the text, tokens, finish reason, usage and speculation of a completion.

    body: the fields of the request. show: takes each piece of text as it comes. Raises as `Server.stream`.
    """
    text = ""
    tokens: list[int] = []
    reason = None
    last: dict[str, Any] = {}
    asked = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    for event in server.stream("/v1/completions", body | asked):
        last = event
        for choice in event["choices"]:
            text += choice["text"]
            tokens += choice["token_ids"]
            reason = choice["finish_reason"] or reason
            show(choice["text"])
    answer = {"text": text, "token_ids": tokens, "finish_reason": reason}
    return answer | {name: last[name] for name in ("usage", "speculation")}


def _read_prompt(flags: argparse.Namespace) -> str:
    if flags.prompt is not None:
        return flags.prompt
    try:
        if flags.prompt_file is not None:
            return Path(flags.prompt_file).read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flags.prompt_file or 'standard input'} is not UTF-8 text: {error}") from None
