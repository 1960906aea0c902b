"""How commands of the lab say what they measured: what was run and where, a table, and a JSON file."""

import argparse
import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], str]]  # for each column, by its name, a function that makes a row's cell

_UNSAID = "command", "task", "json", "plot", "api_key"  # what a command's line leaves out


def describe_run(flags: argparse.Namespace, machine: str) -> dict[str, str]:
    """Return what a result depends on beside the code: the machine, the date and the command line of these flags."""
    return {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "command": command_line(flags)}


def command_line(flags: argparse.Namespace) -> str:
    """Return the command line that these flags come from, defaults included and files of results left out."""
    words = ["specahead", *flags.command.split()]
    for name, value in vars(flags).items():
        if name in _UNSAID or value is None or value is False or value == "":
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def processor() -> str:
    """Return this machine's processor, its cores and how busy they are."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = found.group(1) if found else platform.processor()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def describe(head: Mapping[str, str]) -> str:
    """Return a line for each fact of `describe_run`, and whatever was added to it."""
    return "\n".join(f"{name}: {value}" for name, value in head.items())


def cells_of(columns: Columns[Row], rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of a table as cells, the columns' names first."""
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def text_table(columns: Columns[Row], rows: Sequence[Row], left: int = 2) -> str:
    """Return a table whose first `left` columns are flush left, and the others flush right."""
    return align(cells_of(columns, rows), left)


def align(table: list[list[str]], left: int = 2) -> str:
    """Return lines of cells as a table; left: as for `text_table`."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def aligned(line: list[str]) -> str:
        pairs = list(zip(line, widths, strict=True))
        return "  ".join([cell.ljust(w) for cell, w in pairs[:left]] + [cell.rjust(w) for cell, w in pairs[left:]])

    return "\n".join(aligned(line) for line in table)


def markdown_table(columns: Columns[Row], rows: Sequence[Row], left: int = 2) -> str:
    """Return a table of Markdown; left: as for `text_table`."""
    head, *lines = ["| " + " | ".join(line) + " |" for line in cells_of(columns, rows)]
    rule = "| --- " * left + "| ---: " * (len(columns) - left) + "|"
    return "\n".join([head, rule, *lines])


def live_head(columns: Columns[Any]) -> str:
    """Return the first line of a table whose rows come one by one: each column is as wide as its name."""
    return "  ".join(columns)


def live_line(columns: Columns[Row], row: Row) -> str:
    """Return the line of a row below `live_head`."""
    return "  ".join(cell(row).rjust(len(name)) for name, cell in columns.items())


def to_json(rows: Any) -> str:
    """Return rows, or tables of them by name, as JSON. Rows are dataclasses."""
    return json.dumps(rows, indent=1, default=asdict)


def write_json(file: str | Path | None, content: Mapping[str, Any]) -> None:
    """Write a JSON file with a line for each row, which may be a dataclass, unless `file` is None.

    A regular file is moved into place, so that nobody ever reads a half of it.
    """
    if file is None:
        return
    entries = (f"{json.dumps(name)}: {_with_lines(value)}" for name, value in content.items())
    text, path = "{\n" + ",\n".join(entries) + "\n}\n", Path(file).resolve()
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _with_lines(value: Any) -> str:
    """Return JSON, with a line for each item of a list."""
    dump = partial(json.dumps, default=asdict)
    return "[\n" + ",\n".join(map(dump, value)) + "\n]" if isinstance(value, list) and value else dump(value)
