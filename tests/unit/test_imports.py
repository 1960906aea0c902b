"""Which package may import which: cli → orchestrator → services → wire, engine, sparsity → kernels; and no circles."""

import ast
import importlib
import os
import resource
import sys
from pathlib import Path

import pytest

from specahead.cli.main import COMMANDS
from tests.programs import printed_by, run_program

ROOT = Path(__file__).resolve().parents[2]
SHARED = {f"specahead.{room}" for room in ("config", "kernels", "engine", "sparsity", "wire")}
# Rooms, each a package of modules, and which others it may import.
PACKAGES = {
    "specahead.models": set(),
    "specahead.config": {"specahead.models"},
    "specahead.kernels": set(),
    "specahead.engine": {"specahead.config", "specahead.kernels", "specahead.models"},  # the text that comes with them
    "specahead.sparsity": {"specahead.kernels", "specahead.engine"},
    "specahead.wire": {"specahead.config", "specahead.engine", "specahead.sparsity", "protos"},
    "draft_service": {*SHARED, "protos"},
    "target_service": {*SHARED, "protos", "draft_service"},
    "orchestrator": {*SHARED - {"specahead.kernels"}, "protos", "specahead.models", "draft_service", "target_service"},
    "specahead.lab.evaluation": {*SHARED, "specahead.models", "draft_service", "target_service"},
    "specahead.lab.benchmarks": {
        *(*SHARED, "protos", "specahead.models", "draft_service", "target_service"),
        *("specahead.lab.evaluation", "orchestrator"),
    },
    "specahead.offline": {*("specahead.config", "specahead.wire", "orchestrator", "draft_service", "target_service")},
    # Of evaluations and benchmarks the flags; their modules by name, when their command runs.
    "specahead.cli": {
        *("specahead.config", "specahead.models", "specahead.wire", "orchestrator"),
        *("specahead.lab.benchmarks", "specahead.lab.evaluation"),
    },
}
# Outside specahead/wire/, the edges: where messages leave or enter a process.
PROTO_FILES = {
    "draft_service/link.py",
    "draft_service/service.py",
    "target_service/service.py",
    "target_service/servicer.py",
    "orchestrator/api/endpoints.py",
    "orchestrator/api/grpc_gateway.py",
    "orchestrator/cluster/service_status.py",
    "orchestrator/sessions/target_stream.py",
}
# Only the orchestrator knows Ray.
RAY_FILES = {f"orchestrator/cluster/{name}.py" for name in ("fleet", "connect_ray", "attach", "service_actor")}


def imported(path: Path) -> set[str]:
    """Return the rooms and libraries that a file imports, inside functions too: a room by its name in PACKAGES, a
    library by its first name.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {room_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: a relative import"
            names |= {room_of(f"{node.module}.{alias.name}") for alias in node.names}
    return names


def room_of(module: str) -> str:
    """Return the room that a module or a name in it belongs to; for a library, its first name."""
    first = module.split(".")[0]
    return next((room for room in PACKAGES if f"{module}.".startswith(f"{room}.")), first)


def files_of(package: str) -> list[Path]:
    """Return a room's modules; the kernels lie at the top, where specahead/kernels leads."""
    folder = "kernels" if package == "specahead.kernels" else package.replace(".", "/")
    return sorted((ROOT / folder).rglob("*.py"))


FILES = {path.relative_to(ROOT).as_posix(): imported(path) for package in PACKAGES for path in files_of(package)}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    ours = {*PACKAGES, "protos", "tests", "kernels"}
    for path in files_of(package):
        name = path.relative_to(ROOT).as_posix()
        assert (FILES[name] & ours) - {package} <= PACKAGES[package], name


def test_the_wire_loads_no_models() -> None:
    """What it takes from the engine are domain types."""
    for name in FILES:
        if name.startswith("specahead/wire/"):
            text = (ROOT / name).read_text()
            assert "specahead.engine.loading" not in text and "transformers" not in text, name


@pytest.mark.parametrize("package", ["config", "kernels", "engine", "sparsity", "lab.evaluation"])
def test_grpc_and_ray_stay_above(package: str) -> None:
    for path in files_of(f"specahead.{package}"):
        name = path.relative_to(ROOT).as_posix()
        assert not FILES[name] & {"grpc", "grpc_health", "grpc_reflection", "google", "ray", "protos"}, name


def test_kernels_know_torch_and_triton_alone() -> None:
    allowed = {"specahead.kernels", "torch", "triton", *sys.stdlib_module_names}
    for name, names in FILES.items():
        if name.startswith("kernels/"):
            assert names <= allowed, name


def test_messages_are_parsed_at_the_edges_only() -> None:
    inside = ("specahead/wire/", "specahead/lab/benchmarks/")
    users = {name for name, names in FILES.items() if "protos" in names and not name.startswith(inside)}
    assert users == PROTO_FILES


def test_ray_is_used_in_one_place() -> None:
    assert {name for name, names in FILES.items() if "ray" in names} == RAY_FILES


@pytest.mark.parametrize("module", ["specahead.cli.health", "orchestrator.launch"])
def test_grpc_is_told_before_it_is_loaded_that_it_is_not_to_handle_forks(module: str) -> None:
    """Its handlers may kill what Ray forks when it is started again under a gateway that serves (wire/__init__.py)."""
    program = (
        "import os, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'grpc': print(os.environ.get('GRPC_ENABLE_FORK_SUPPORT'))\n"
        "sys.meta_path.insert(0, Look())\n"
        f"import {module}"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    assert printed_by(program, environment) == "0\n"


def test_help_is_there_at_once() -> None:
    """Without libraries that take long to load, since every command that talks to a server elsewhere begins so."""
    program = (
        "import sys, specahead.cli.main as cli\n"
        "for command in ('--help', *(f'{name} --help' for name in cli.COMMANDS)):\n"
        "    try: cli.main(command.split())\n"
        "    except SystemExit as ended: assert not ended.code, command\n"
        "print(sorted({'torch', 'numpy', 'ray', 'transformers'} & set(sys.modules)))"
    )
    spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    done = run_program(program)
    assert done.returncode == 0 and done.stdout.endswith("\n[]\n"), done.stderr
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - spent < 3, "seconds of a processor"


def test_every_command_has_a_module_that_runs_it() -> None:
    for command in COMMANDS.values():
        assert callable(importlib.import_module(command.module).run)


def test_without_triton_kernels_are_imported_and_only_launching_fails() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, specahead.engine.steps.graphs, specahead.kernels.selection as k\n"
        "one = torch.ones(1, dtype=torch.int32)\n"
        "print(k.mark_over_rows(torch.ones(1, 1, 4), one).item())\n"
        "k.mark_over_rows(torch.ones(1, 1, 4), one, 'triton')\n"
    )
    done = run_program(program)
    assert done.stdout == "1\n"
    assert done.stderr.strip().endswith("Triton is not installed; install it or use backend='torch'")


# Circles


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for types alone count as well, and those within functions."""
    files = {path: dotted(path) for package in PACKAGES for path in files_of(package)}
    graph = {name: modules_of(path) & set(files.values()) for path, name in files.items()}
    found = circle_of(graph)
    assert not found, " → ".join(found)


def test_a_circle_is_found() -> None:
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a", "c"}}) == []
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_of({"a": {"a"}}) == ["a", "a"]


def dotted(path: Path) -> str:
    """Return the name that a file is imported by."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"specahead.{name}" if name.split(".")[0] == "kernels" else name


def modules_of(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere; `from a import b` imports a.b if that is a module, else a."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if is_module(name)}
            names |= modules if modules == inner else {*modules, node.module}
    return names


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """The names along one circle, the first at its end again; empty if there is none."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := search(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])
