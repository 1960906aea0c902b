"""Compiling kernels for an H100 where no GPU is: in a process of its own, without Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_without_interpreter(program: str, cache: Path) -> None:
    """Run a program that calls `compile_for_gpu`; fails with what it printed. cache: an empty folder for Triton's."""
    given = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def compile_for_gpu(kernel: Any, types: dict[str, str], fixed: dict[str, Any], **options: Any) -> str:
    """Return the PTX of a kernel. types: of the arguments given at a launch, pointers at addresses that are multiples
    of 16, as tensors' are; fixed: the values of all others.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
