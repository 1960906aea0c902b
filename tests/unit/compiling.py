"""Kernels compiled for an H100 where there is no GPU: the compiler refuses some of what Triton's interpreter runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

_SCRIPT = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for variant in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(variant["module"]), variant["kernel"])
    names, fixed = kernel.arg_names, variant["fixed"]
    signature = {name: variant["types"].get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()})
    options = {"launch_pdl": True} if fixed.get("PDL") else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == bool(options), variant
"""


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants. types: of the other arguments, as Triton names them; fixed: the constants."""

    module: str
    kernel: str
    types: dict[str, str]
    fixed: dict[str, int | float | bool | None]


def compile_for_gpu(variants: Iterable[Variant], cache: Path) -> None:
    """Raise AssertionError if one does not compile. It runs in a process of its own, without the interpreter."""
    given = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", _SCRIPT, json.dumps([asdict(variant) for variant in variants])]
    run = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
