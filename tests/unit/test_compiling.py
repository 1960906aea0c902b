"""Kernels are compiled before they are launched, for a GPU that is not there: in a process without the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Stands in for a GPU's driver, and has everything on the CPU's tensors take the kernels.
ON_A_GPU = """
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from kernels import backends

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
backends.default_backend = lambda device: "triton"
backends.overlapping_launch = lambda device: {"PDL": True, "launch_pdl": True}
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
from kernels.compiling import compile_ahead
"""

A_ROUND_AND_A_STEP = """
from functools import partial
from benchmarks.shapes import Shape, random_decoder
from engine.announcing import Announcer
from engine.kv.cache import KVCache
from engine.loading.eight_bit import with_eight_bit_weights
from engine.pass_runner import PassRunner
from engine.passes.behind_rounds import LeftRounds
from engine.passes.grouping import StepLimits
from engine.passes.shape import PassShape
from engine.read_memories import ReadMemories
from engine.round_runner import RoundRunner
from engine.rounds.behind_steps import LeftVerdicts
from engine.rounds.buffers import RoundShape
from engine.rounds.requests import RoundSettings

shape = Shape(4, 1024, 16, 2, 64, 2048, 4096)
decoder = random_decoder(shape, 8192, "cpu")
kv = KVCache(4, 2, 64, 600, torch.bfloat16, "cpu")
kv.keep_group_means(64)
announcer = Announcer(torch.randint(64, (8, 3), dtype=torch.int32), torch.rand(8, 3), "over_all")
settings = RoundSettings(6, 64, 16, 0.1, 1, 4, {"ahead": announcer}, refresh_every=4)
rounds = RoundRunner(with_eight_bit_weights(decoder), kv, settings, 4096, 400, "triton", captures=False)
rounds.left_verdicts = LeftVerdicts.make(8, torch.device("cpu"))
steps = PassRunner(decoder, kv, StepLimits(400, 5, 16), ReadMemories(8), False, None)
steps.left_rounds = LeftRounds.make(8, 6, 4, (8, 7), torch.device("cpu"))
step = PassShape(
    2, 10, 5, 400, 16, width=400, groups=100, read_weights=True, decay=0.9, judged=True, behind=True
)
round_ = RoundShape(2, 2, 400, sampled=False, method="ahead", refreshes=False, behind=True)
make_buffers, launch = rounds._ways_of(round_)
buffers = make_buffers()
with torch.inference_mode():
    compile_ahead([lambda: partial(launch, buffers), partial(steps.launches_of, step)])
assert not any(part.any() for part in (*kv.k_pages, *kv.v_pages, buffers.results._device))
"""

ONE_LAUNCH = """
from kernels.rms_norm import _add_rms_norm_kernel, add_rms_norm

hidden, weight = torch.rand(4, 64), torch.rand(64)
before = hidden.clone()
launch = lambda: add_rms_norm(hidden, hidden, weight, 1e-5, "triton")
compile_ahead([lambda: launch, lambda: launch])
compiled = _add_rms_norm_kernel.device_caches[0][0]
(first,) = compiled
_add_rms_norm_kernel.warmup(
    *(hidden, hidden, weight, torch.empty_like(hidden), torch.empty_like(hidden)), 64, 64, 1e-5, 1.0, 4,
    PARTS=1, SIZE=64, num_warps=4, PDL=True, launch_pdl=True, grid=(4,),
)
assert list(compiled) == [first], list(compiled)
assert torch.equal(hidden, before)
"""

MANY = """
from kernels.rms_norm import add_rms_norm

made = []

def maker(size):
    made.append(size)
    return lambda: add_rms_norm(torch.rand(4, 16 * size), None, torch.rand(16 * size), 1e-5, "triton")

compile_ahead([lambda size=size: maker(size) for size in range(1, 21)])
print(len(made))
"""

A_FAULT = """
from kernels.backends import jit, tl

@jit
def kernel(x_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 8, "too many")
    tl.store(x_ptr, SIZE)

compile_ahead([lambda: lambda: kernel[(1,)](torch.zeros(1), SIZE=9)])
"""


def run_on_a_gpu(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a script with kernels that are compiled for a GPU, to a folder."""
    given = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    file = folder / "script.py"  # a kernel's source is read from its file
    file.write_text(ON_A_GPU + script)
    path = os.pathsep.join(filter(None, (os.getcwd(), given.get("PYTHONPATH"))))
    command = [sys.executable, str(file)]
    return subprocess.run(
        command, env=given | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.timeout(300)
def test_a_round_and_a_step_compile_and_write_nothing(tmp_path: Path) -> None:
    """All that a draft's round launches, and a step of its target behind it, is compiled; nothing of it runs."""
    run = run_on_a_gpu(A_ROUND_AND_A_STEP, tmp_path)
    assert run.returncode == 0, run.stderr
    names = {file.stem for file in tmp_path.glob("*/*.cubin")}
    expected = "partial_attention_kernel merge_kernel _few_rows_linear_kernel _rotate_and_write_kv_kernel emit_kernel"
    assert names >= {
        *expected.split(),
        "_remember_weights_kernel",
        "_score_own_blocks_kernel",
        "threshold_kernel",
        "_cut_rounds_kernel",
        "_take_drafted_kernel",
    }


def test_what_is_compiled_ahead_is_found_where_it_is_launched(tmp_path: Path) -> None:
    run = run_on_a_gpu(ONE_LAUNCH, tmp_path)
    assert run.returncode == 0, run.stderr


def test_what_an_earlier_process_has_compiled_is_hardly_gone_through(tmp_path: Path) -> None:
    assert [run_on_a_gpu(MANY, tmp_path).stdout for _ in range(2)] == ["20\n", "7\n"]


def test_a_kernel_that_does_not_compile_is_told(tmp_path: Path) -> None:
    run = run_on_a_gpu(A_FAULT, tmp_path)
    assert run.returncode == 1
    assert "too many" in run.stderr
