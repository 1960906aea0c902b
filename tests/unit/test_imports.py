"""Which package may import which: orchestrator → services → wire, engine, sparsity → kernels."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "kernels": set(),
    "engine": {"kernels"},
    "sparsity": {"kernels", "engine"},
    "wire": {"engine", "sparsity", "protos"},
    "draft_service": {"kernels", "engine", "sparsity", "wire", "protos"},
    "target_service": {"kernels", "engine", "sparsity", "wire", "protos"},
    "evaluation": {"kernels", "engine", "sparsity", "models"},
    "orchestrator": {
        *("engine", "sparsity", "wire", "protos", "models"),
        *("draft_service", "target_service", "benchmarks", "evaluation"),
    },
}
# Outside wire/, the edges: where messages leave or enter a process.
PROTO_FILES = {
    "draft_service/link.py",
    "draft_service/service.py",
    "target_service/service.py",
    "target_service/servicer.py",
    "orchestrator/client.py",
    "orchestrator/grpc_gateway.py",
    "orchestrator/launch.py",
    "orchestrator/router.py",
}
# Only the orchestrator knows Ray, in one place.
RAY_FILES = {"orchestrator/cluster.py"}
# Its only user; installed or not, all else runs.
FLASHINFER = {"kernels/flashinfer_attention.py": {"flashinfer"}}
# Sessions, drafter and verifier take events and give events.
WITHOUT_GRPC = {
    "draft_service/drafter.py",
    "draft_service/session.py",
    "target_service/recording.py",
    "target_service/session.py",
    "target_service/verifier.py",
    "orchestrator/identity.py",
    "orchestrator/ledger.py",
    "orchestrator/requests.py",
    "orchestrator/settings.py",
    "orchestrator/text.py",
}


def imported(path: Path) -> set[str]:
    """Top-level names of all packages that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add((node.module or "").split(".")[0])
    return names


FILES = {
    path.relative_to(ROOT).as_posix(): imported(path)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    ours = {*PACKAGES, "protos", "models", "benchmarks", "tests"}
    for name, names in FILES.items():
        if name.startswith(f"{package}/"):
            assert (names & ours) - {package} <= PACKAGES[package], name


@pytest.mark.parametrize("package", ["kernels", "engine", "sparsity", "evaluation"])
def test_grpc_and_ray_stay_above(package: str) -> None:
    for name, names in FILES.items():
        if name.startswith(f"{package}/"):
            assert not names & {"grpc", "grpc_health", "grpc_reflection", "google", "ray", "protos"}, name


def test_kernels_know_torch_and_triton_alone() -> None:
    allowed = {
        "kernels",
        "torch",
        "triton",
        "typing",
        "collections",
        "dataclasses",
        "functools",
        "inspect",
        "time",
        "types",
    }
    for name, names in FILES.items():
        if name.startswith("kernels/"):
            assert names <= allowed | FLASHINFER.get(name, set()), name


def test_messages_are_parsed_at_the_edges_only() -> None:
    users = {name for name, names in FILES.items() if "protos" in names and not name.startswith("wire/")}
    assert users == PROTO_FILES


def test_ray_is_used_in_one_place() -> None:
    assert {name for name, names in FILES.items() if "ray" in names} == RAY_FILES


def test_logic_knows_no_grpc() -> None:
    assert set(FILES) >= WITHOUT_GRPC
    for name in WITHOUT_GRPC:
        assert not FILES[name] & {"grpc", "protos", "ray"}, name


def test_without_triton_kernels_are_imported_and_only_launching_fails() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, engine.graphs, kernels.shared_top_k as k\n"
        "one = torch.ones(1, dtype=torch.int32)\n"
        "print(k.mark_top_k_over_all(torch.ones(1, 1, 4), one).item())\n"
        "k.mark_top_k_over_all(torch.ones(1, 1, 4), one, 'triton')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert done.stderr.strip().endswith("Triton is not installed; install it or use backend='torch'")
