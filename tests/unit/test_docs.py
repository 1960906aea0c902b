"""What the documents name is there: files, tests, commands and their flags, settings, metrics, paths of HTTP."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from orchestrator.api.dashboard.routes import router as dashboard
from orchestrator.api.http_gateway import router
from specahead.cli.main import COMMANDS
from specahead.config.resolve import ENVIRONMENT_PREFIX, NAMES
from tests.stack import ROOT

LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
)
FILES = [name for name in LISTED.stdout.splitlines() if (ROOT / name).exists()]
DOCUMENTS = [name for name in FILES if name.endswith(".md")]
ROOMS = {name.split("/")[0] for name in FILES if "/" in name}
# Names of others: Ray's, transformers', pytest's and the like.
FOREIGN_FLAGS = {"--node-ip-address", "--head"}
FOREIGN_WORDS = {"response_template", "start_server_span"}
FOREIGN_PROGRAMS = ("ray ", "torchrun ", "curl ", "grpcurl ", "pip ", "docker ", "helm ", "kubectl ", "pytest ", "git ")
MADE_BY_FASTAPI = {"/docs", "/openapi.json"}


@cache
def source() -> str:
    """The text of everything but documents."""
    kinds = (".py", ".proto", ".toml", ".json", ".yaml", ".yml", ".jinja", "Makefile", ".txt", ".sh", "Dockerfile")
    own = (ROOT / name for name in FILES if name.endswith(kinds) and not name.endswith("test_docs.py"))
    return "\n".join(path.read_text(errors="replace") for path in own)


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source()))


def quoted(text: str) -> list[str]:
    """Return what stands between single backticks, outside of fences."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def fenced(text: str) -> list[str]:
    """Return the lines of fenced blocks, those that are continued joined, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def expanded(name: str) -> Iterator[str]:
    """Yield a{b,c}d as abd and acd."""
    pieces = [piece.split(",") for piece in re.split(r"\{([^}]*)\}", name)]
    pieces[::2] = [[",".join(piece)] for piece in pieces[::2]]
    yield from ("".join(choice) for choice in product(*pieces))


def exists(name: str) -> bool:
    """Return whether a path is a file or folder of the project, by itself, below tests, or by its last part alone."""
    if "/" not in name.rstrip("/"):
        return any(Path(file).name == name or name.rstrip("/") in Path(file).parts for file in FILES)
    return any(
        (ROOT / folder / name).exists() for folder in ("", "tests", "specahead", "specahead/engine", "specahead/lab")
    )


def missing_files(text: str) -> Iterator[str]:
    for token in quoted(text):
        looks_like_path = re.fullmatch(r"[\w./{},-]+\.(py|proto)|[\w-]+(/[\w.{},-]+)+/?|[\w]+/", token)
        first = token.split("/")[0]
        if looks_like_path and (token.endswith((".py", ".proto")) or first in ROOMS):
            yield from (name for name in expanded(token) if not exists(name))


def missing_links(document: str, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        if not path.exists():
            yield target
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
            if anchor not in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}:
                yield target


def missing_tests(text: str) -> Iterator[str]:
    """`…::test_x` is of the file that was named last."""
    file = ""
    for name, test in re.findall(r"`((?:[\w/]*test_\w+\.py)|…)::(\w+)", text):
        file = file if name == "…" else name
        found = [path for path in FILES if path.endswith(file)]
        if not any(re.search(rf"def {test}\b", (ROOT / path).read_text()) for path in found):
            yield f"{file}::{test}"


def missing_names(text: str) -> Iterator[str]:
    """Settings, metrics, counters, fields: whatever is written with underscores."""
    for token in quoted(text):
        name = token.removeprefix("specahead:").removeprefix("vllm:").removesuffix("_total")
        if token.startswith(ENVIRONMENT_PREFIX) and "=" not in token:
            if re.fullmatch(r"\w+", token) and token not in source():
                setting = token.removeprefix(ENVIRONMENT_PREFIX).lower()
                if setting not in NAMES:
                    yield token
        elif re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name) and not words() & {name, token} and name not in FOREIGN_WORDS:
            yield token


def missing_modules(text: str) -> Iterator[str]:
    """`room.module.Name`."""
    for token in quoted(text):
        first, *rest = token.split(".")
        if re.fullmatch(r"\w+(\.\w+)+", token) and first in ROOMS and rest[-1] not in ("py", "proto"):
            parents = [Path(first, *rest[:end]) for end in range(len(rest), -1, -1)]
            if not any((ROOT / parent).is_dir() or (ROOT / f"{parent}.py").exists() for parent in parents[:2]):
                yield token


def missing_paths(text: str) -> Iterator[str]:
    served = {route.path for route in (*router.routes, *dashboard.routes)} | MADE_BY_FASTAPI  # type: ignore[attr-defined]
    for token in quoted(text):
        if re.fullmatch(r"/(v1/)?[a-z]+(/[a-z]+)?(\.json)?", token) and token not in served:
            yield token


# Commands and flags


@cache
def flags_of(command: str) -> frozenset[str]:
    """Return the long flags of `specahead COMMAND` or `python -m MODULE`."""
    command = "serve" if command == "orchestrator.launch" else command
    if command in COMMANDS:
        parser = argparse.ArgumentParser()
        COMMANDS[command].declare(parser)
        parsers, found = [parser], set()
        for each in parsers:
            for action in each._actions:
                found |= set(action.option_strings)
                parsers += action.choices.values() if isinstance(action, argparse._SubParsersAction) else []
        return frozenset(found)
    run = [sys.executable, "-m", command, "--help"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return frozenset(re.findall(r"--[\w-]+", done.stdout))


@cache
def all_flags() -> frozenset[str]:
    declared = {f"--{name}" for name in re.findall(r'"--([a-z][\w-]*)"', source())}
    commands = [*COMMANDS, "orchestrator.launch", "target_service", "draft_service"]
    return frozenset(declared | FOREIGN_FLAGS).union(*map(flags_of, commands))


def missing_commands(text: str) -> Iterator[str]:
    """In fences and between backticks: subcommands, modules, targets of make, and the flags behind them."""
    for line in [*fenced(text), *quoted(text)]:
        line = re.sub(r"^(\w+=\S+ )*(\S*/bin/|… )?", "", line)
        if line.startswith(FOREIGN_PROGRAMS):
            continue
        flags = re.findall(r"(?<!\S)--[a-z][\w-]*(?![\w…-])", line)
        if made := re.match(r"make ([a-z][\w-]*)", line):
            if not re.search(rf"^{made[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE):
                yield line
            continue
        command = _command_in(line)
        if command is None:
            known = all_flags()
        elif command == "":
            yield line
            continue
        else:
            known = flags_of(command) | {"--help", "--version"}
        yield from (f"{flag} in {line!r}" for flag in flags if flag not in known)


def _command_in(line: str) -> str | None:
    """Return the subcommand or module that a line runs; empty for one that is not there, None for anything else."""
    if module := re.match(r"(?:python3? -m )?(orchestrator\.\w+|[a-z]+_service)(?: |$)", line):
        return module[1] if re.search(r"-m |launch", line) else None
    if module := re.match(r"python3? -m ([\w.]+)", line):
        path = ROOT / module[1].replace(".", "/")
        return None if path.is_dir() or path.with_suffix(".py").exists() else ""
    if called := re.match(r"specahead ([a-z]+(?: [a-z][a-z-]*)?)", line):
        name = called[1]
        return next((each for each in (name, name.split()[0]) if each in COMMANDS or each == "bench"), "") or ""
    return None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    missing = [
        *missing_files(text),
        *missing_links(document, text),
        *missing_tests(text),
        *missing_names(text),
        *missing_modules(text),
        *missing_paths(text),
        *missing_commands(text),
    ]
    assert not missing, f"{document} names what is not there: {missing}"


def test_what_is_gone_is_noticed() -> None:
    """Else the test above would say little."""
    text = """`wire/gone.py` `gone.py` [a](gone.md) [b](README.md#gone) `unit/test_docs.py::test_gone` `gone_counter`
    `SPECAHEAD_GONE` `wire.gone.Gone` `/v1/gone` `make gone` `specahead gone` `specahead key --gone` `--gone-flag`
    `python -m gone` `python -m orchestrator.launch --gone`
    """
    assert len([*missing_files(text)]) == 2
    assert len([*missing_links("README.md", text)]) == 2
    assert [*missing_tests(text)] == ["unit/test_docs.py::test_gone"]
    assert [*missing_names(text)] == ["gone_counter", "SPECAHEAD_GONE"]
    assert [*missing_modules(text)] == ["wire.gone.Gone"]
    assert [*missing_paths(text)] == ["/v1/gone"]
    assert len([*missing_commands(text)]) == 6
