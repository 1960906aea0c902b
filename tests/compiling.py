"""Compiling Triton kernels for a GPU where there is none: what the interpreter allows, the compiler may not."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# In a process of its own: in this one kernels may have been imported for the interpreter.
_COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, types, variants = json.loads(sys.argv[1])
kernel = getattr(importlib.import_module(module), name)
names, compiled = kernel.arg_names, []
for fixed in variants:
    own = types | fixed.pop("types", {})
    signature = {name: "constexpr" if name in fixed else own[name] for name in names}
    fixed = {(names.index(name),): tuple(value) if isinstance(value, list) else value for name, value in fixed.items()}
    pointers = [(index,) for index, name in enumerate(names) if signature[name].startswith("*")]
    aligned = {at: [["tt.divisibility", 16]] for at in pointers}
    source = ASTSource(kernel, signature, fixed, aligned)
    options = {"launch_pdl": True} if "PDL" in names and fixed.get((names.index("PDL"),)) else {}
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert program.metadata.shared <= 227 * 1024, f"{program.metadata.shared} bytes of shared memory"
    compiled.append(program.asm["ptx"])
print(json.dumps(compiled))
"""


def compile_for_a_gpu(
    module: str, kernel: str, types: Mapping[str, str], variants: Sequence[Mapping[str, object]], cache: Path
) -> list[str]:
    """Compile a kernel of a module for a Hopper GPU, in whose shared memory it fits; return the PTX of each variant.

    types: Triton's names for the types of what is passed at a launch, pointers to multiples of 16 as tensors' are.
    variants: the values of everything else, None of tensors that are not there, which may have a type; "types": those
    that a variant has of its own. cache: a folder for what Triton keeps.
    """
    given = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    asked = json.dumps([module, kernel, dict(types), [dict(each) for each in variants]])
    command = [sys.executable, "-c", _COMPILE, asked]
    run = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    compiled: list[str] = json.loads(run.stdout)
    return compiled
