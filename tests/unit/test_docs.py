"""Everything that the documents name exists: files, links, tests, commands, flags, settings, metrics, paths of HTTP.

The pages also keep to their length, and the site lists each of them.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import yaml

from orchestrator.api.dashboard.routes import router as dashboard
from orchestrator.api.http_gateway import router
from specahead.cli.main import COMMANDS
from specahead.config.resolve import ENVIRONMENT_PREFIX
from tests.stack import ROOT

LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
LISTING = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True).stdout
FILES = [name for name in LISTING.splitlines() if (ROOT / name).exists()]
DOCUMENTS = [name for name in FILES if name.endswith(".md")]
ROOMS = {name.split("/")[0] for name in FILES if "/" in name}
HOMES = ("", "tests", "specahead", "specahead/engine", "specahead/lab")  # folders that paths may leave out
# Names that belong to Ray, transformers, Kubernetes and others.
FOREIGN_FLAGS = {"--node-ip-address", "--head"}
FOREIGN_WORDS = {"start_server_span"}
FOREIGN_PROGRAMS = (
    "claude ",
    *("ray ", "torchrun ", "curl ", "grpcurl ", "pip ", "docker ", "helm ", "kubectl ", "pytest ", "git "),
    "lm_eval ",
)
PROTOBUF = "specahead.v1"
MADE_BY_FASTAPI = {"/docs", "/openapi.json"}
MOST_LINES = {"README.md": 100, "docs/architecture.md": 250, "docs/performance.md": 150, "docs/quality.md": 150}


@cache
def source() -> str:
    """Return the text of everything except documents and this test."""
    kinds = (".py", ".proto", ".toml", ".json", ".yaml", ".yml", ".jinja", "Makefile", ".txt", ".sh", "Dockerfile")
    own = (ROOT / name for name in FILES if name.endswith(kinds) and not name.endswith("test_docs.py"))
    return "\n".join(path.read_text(errors="replace") for path in own)


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source()))


def quoted(text: str) -> list[str]:
    """Return what stands between single backticks, outside of fences; a quotation may span lines."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s*\n\s*", " ", each) for each in re.findall(r"`([^`\n]+(?:\n[^`\n]+){0,3})`", outside)]


def fenced(text: str) -> list[str]:
    """Return the lines of fenced blocks without comments, continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def expanded(name: str) -> Iterator[str]:
    """Yield a{b,c}d as abd and acd."""
    pieces = [piece.split(",") for piece in re.split(r"\{([^}]*)\}", name)]
    pieces[::2] = [[",".join(piece)] for piece in pieces[::2]]
    yield from ("".join(choice) for choice in product(*pieces))


def exists(name: str) -> bool:
    """Return whether a path is a file or folder of the project: by its name alone, or below one of HOMES."""
    if "/" not in name.rstrip("/"):
        return any(Path(file).name == name or name.rstrip("/") in Path(file).parts for file in FILES)
    return any((ROOT / home / name).exists() for home in HOMES)


def missing_files(text: str) -> Iterator[str]:
    for token in quoted(text):
        looks_like_path = re.fullmatch(r"[\w./{},-]+\.(py|proto)|[\w-]+(/[\w.{},-]+)+/?|[\w]+/", token)
        if looks_like_path and (token.endswith((".py", ".proto")) or token.split("/")[0] in ROOMS):
            yield from (name for name in expanded(token) if not exists(name))


def missing_links(document: str, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        if "://" in target:
            continue
        if not path.exists():
            yield target
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
            if anchor not in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}:
                yield target


def missing_tests(text: str) -> Iterator[str]:
    for file, test in re.findall(r"`([\w/]*test_\w+\.py)::(\w+)", text):
        found = [path for path in FILES if path.endswith(file)]
        if not any(re.search(rf"def {test}\b", (ROOT / path).read_text()) for path in found):
            yield f"{file}::{test}"


def missing_names(text: str) -> Iterator[str]:
    """Yield unknown settings, metrics, counters and fields: whatever is written with underscores."""
    for token in quoted(text):
        name = token.removeprefix("specahead:").removeprefix("vllm:").removesuffix("_total")
        if token.startswith(ENVIRONMENT_PREFIX):
            variable = token.split("=")[0]
            flag = "--" + variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
            if re.fullmatch(r"\w+", variable) and flag not in flags_of("serve") and variable not in source():
                yield token
        elif re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name) and not words() & {name, token} and name not in FOREIGN_WORDS:
            yield token


def missing_modules(text: str) -> Iterator[str]:
    """Yield each `room.module.Name` whose module is not there."""
    for token in quoted(text):
        first, *rest = token.removeprefix(f"{PROTOBUF}.").split(".")
        if token.startswith(f"{PROTOBUF}.") and not re.search(rf"(service|message) {first}\b", source()):
            yield token
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
    """Yield unknown subcommands, modules and targets of make, and unknown flags of those that exist."""
    for line in [*fenced(text), *quoted(text)]:
        line = re.sub(r"^(\w+=\S+ )*(\S*/bin/|… )?", "", line)
        if line.startswith(FOREIGN_PROGRAMS):
            continue
        if made := re.match(r"make ([a-z][\w-]*)", line):
            if not re.search(rf"^{made[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE):
                yield line
            continue
        command = _command_in(line)
        if command == "":
            yield line
            continue
        known = all_flags() if command is None else flags_of(command) | {"--help", "--version"}
        flags = re.findall(r"(?<!\S)--[a-z][\w-]*(?![\w…-])", line)
        yield from (f"{flag} in {line!r}" for flag in flags if flag not in known)


def _command_in(line: str) -> str | None:
    """Return the subcommand or module that a line runs; empty if there is none of its name, None for other lines."""
    if module := re.match(r"(?:python3? -m )?(orchestrator\.\w+|[a-z]+_service)(?: |$)", line):
        return module[1] if re.search(r"-m |launch", line) else None
    if module := re.match(r"python3? -m ([\w.]+)", line):
        path = ROOT / module[1].replace(".", "/")
        return None if path.is_dir() or path.with_suffix(".py").exists() else ""
    if called := re.match(r"specahead ([a-z]+(?: [a-z][a-z-]*)?)", line):
        first, *_ = name = called[1].split()
        return next((each for each in (" ".join(name), first) if each in COMMANDS), "")
    return None


@cache
def keys_of(flag: str) -> list[str]:
    """Return the keys of a setting whose value is JSON, in the order of its help."""
    parser = argparse.ArgumentParser()
    COMMANDS["serve"].declare(parser)
    about = next((action.help or "" for action in parser._actions if flag in action.option_strings), "")
    return re.findall(r'(?:\[|")(\w+)"?: ', about)


def missing_keys(text: str) -> Iterator[str]:
    """Yield unknown keys of settings whose values are JSON."""
    for line in [*fenced(text), *quoted(text)]:
        if line.startswith(FOREIGN_PROGRAMS):
            continue
        for setting, value in re.findall(rf"(--[a-z-]+ |{ENVIRONMENT_PREFIX}\w+=)'(\{{[^']*\}})'", line):
            flag = setting.replace(ENVIRONMENT_PREFIX, "--").lower().replace("_", "-").strip(" =")
            yield from json.loads(value).keys() - set(keys_of(flag))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    missing = [*missing_files(text), *missing_links(document, text), *missing_tests(text), *missing_names(text)]
    missing += [*missing_modules(text), *missing_paths(text), *missing_commands(text), *missing_keys(text)]
    assert not missing, f"{document} names what is not there: {missing}"


def test_what_is_gone_is_noticed() -> None:
    """The test above would prove little otherwise."""
    text = """`wire/gone.py` `gone.py` [a](gone.md) [b](README.md#gone) `unit/test_docs.py::test_gone` `gone_counter`
    `SPECAHEAD_GONE` `SPECAHEAD_GONE=1` `specahead.wire.gone.Gone` `specahead.v1.Gone` `/v1/gone` `make gone`
    `specahead gone` `specahead bench gone` `specahead key --gone` `--gone-flag` `python -m gone`
    `python -m orchestrator.launch --gone` `specahead key
    --gone-too` `--speculation '{"gone": 1, "gamma": 4}'` `SPECAHEAD_SPECULATION='{"gone_too": 1}'`
    """
    assert len([*missing_files(text)]) == 2
    assert len([*missing_links("README.md", text)]) == 2
    assert [*missing_tests(text)] == ["unit/test_docs.py::test_gone"]
    assert [*missing_names(text)] == ["gone_counter", "SPECAHEAD_GONE", "SPECAHEAD_GONE=1"]
    assert [*missing_modules(text)] == ["specahead.wire.gone.Gone", "specahead.v1.Gone"]
    assert [*missing_paths(text)] == ["/v1/gone"]
    assert len([*missing_commands(text)]) == 8
    assert [*missing_keys(text)] == ["gone", "gone_too"]


def test_the_tuning_page_explains_every_key() -> None:
    page = (ROOT / "docs/guides/tuning.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE) == keys_of("--speculation")


@pytest.mark.parametrize("document", MOST_LINES)
def test_a_page_is_no_longer_than_its_readers_patience(document: str) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= MOST_LINES[document]


def test_the_site_lists_every_page_once() -> None:
    def pages(entry: str | list | dict) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    hook = (ROOT / "docs/site_pages.py").read_text()
    outside = dict(re.findall(r'"([\w/]+\.md)": "([\w-]+\.md)"', hook))
    listed = sorted(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert listed == sorted([*outside.values(), *(f[5:] for f in DOCUMENTS if f.startswith("docs/"))])
    assert all((ROOT / name).exists() for name in outside)
