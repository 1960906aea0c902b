"""`specahead chat`: a conversation with the model of a running server, at the terminal or line by line from a pipe."""

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specahead.cli.flags import asked_sampling
from specahead.cli.server import Server

_REASONING, _ASIDE = "italic dim", "dim"
_HELP = """\
/new              begin anew
/exact            check each token of the next answers against the whole text
/approximate      read only what matters of a long text for the next answers
/save FILE        write the conversation to a file, as JSON
/help             show this
Ctrl-C ends an answer, Ctrl-D the conversation."""


def run(flags: argparse.Namespace) -> None:
    """Answer each line of standard input until it ends. Raises ValueError for a refusal of the server, OSError if it
    does not answer; at a terminal the conversation continues after a refusal, without the refused message."""
    server, console = Server(flags), Console(highlight=False, soft_wrap=True)
    model = server.get("/v1/models")["data"][0]["id"]
    body = {"model": model, "stream_options": {"include_usage": True}} | asked_sampling(flags)
    opening = [{"role": "system", "content": flags.system}] if flags.system else []
    messages = list(opening)
    if sys.stdin.isatty():
        # A shell has its background jobs ignore Ctrl-C; at a terminal it is meant.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.print(Text(f"{model} at {server.url}. /help lists commands, Ctrl-D ends.", _ASIDE))
    for line in _lines():
        if line == "/new":
            messages = list(opening)
        elif line == "/help":
            console.print(Text(_HELP, _ASIDE))
        elif line in ("/exact", "/approximate"):
            body["exactness"] = line.removeprefix("/")
        elif line.split()[0] == "/save":
            console.print(Text(_save(line.removeprefix("/save").strip(), messages), _ASIDE))
        else:
            messages = _continued(server, body, [*messages, {"role": "user", "content": line}], console)


def _continued(
    server: Server, body: dict[str, Any], asked: list[dict[str, str]], console: Console
) -> list[dict[str, str]]:
    """Return a conversation with its answer; after a refusal at a terminal, the conversation before it."""
    try:
        answer = _answer(server, body | {"messages": asked}, console)
    except ValueError as error:
        if not sys.stdin.isatty():
            raise
        print(f"error: {error}", file=sys.stderr)
        return asked[:-1]
    return [*asked, {"role": "assistant", "content": answer}]


def _save(file: str, messages: list[dict[str, str]]) -> str:
    """Write a conversation to a file, and return what to say about it."""
    if not file:
        return "error: give a file: /save FILE"
    try:
        Path(file).expanduser().write_text(json.dumps(messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        return f"error: {file} cannot be written: {error.strerror}"
    return f"{len(messages)} messages are in {file}"


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that say something; at a terminal each is asked for and can be edited.

    Ctrl-C drops the line that is being written.
    """
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with contextlib.suppress(ImportError):  # where there is none, lines are edited as the terminal does it
        import readline  # noqa: F401  # `input` uses it
    with contextlib.suppress(EOFError):
        while True:
            try:
                line = input("> ").strip()
            except KeyboardInterrupt:  # the line is dropped
                print()
                continue
            if line:
                yield line


def _answer(server: Server, body: dict[str, Any], console: Console) -> str:
    """Show an answer as it comes, and return its text. Ctrl-C at a terminal ends it, and it stays as it is."""
    answer, last = "", {}
    try:
        with contextlib.closing(server.stream("/v1/chat/completions", body)) as events:
            for event in events:
                last = event
                for choice in event["choices"]:
                    delta = choice["delta"]
                    content, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
                    answer += content
                    console.print(Text(reasoning, _REASONING), end="")
                    console.print(Text(content), end="")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    console.print()
    if console.is_terminal and "speculation" in last:
        console.print(Text(_account(last), _ASIDE))
    return answer


def _account(last: dict[str, Any]) -> str:
    """Return a line on how an answer came about. last: the stream's last event."""
    tokens, speculation = last["usage"]["completion_tokens"], last["speculation"]
    rounds = speculation["rounds"] + speculation["plain_rounds"]
    return f"{tokens} tokens in {rounds} rounds; {speculation['accepted']} of them were drafted and accepted"
