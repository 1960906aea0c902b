"""Kernels are compiled before they are launched, for a GPU that is not there: in a process without the interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from specahead.kernels.compiling import Compilers, Launch

# Stands in for a GPU's driver, and has everything on the CPU's tensors take the kernels.
ON_A_GPU = """
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from specahead.kernels import backends
from tests.unit.fake_launcher import Launcher

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32), launcher_cls=Launcher,
))
backends.default_backend = lambda device: "triton"
backends.overlapping_launch = lambda device: {"PDL": True, "launch_pdl": True}
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
from specahead.kernels.compiling import compile_ahead
"""

A_ROUND_AND_A_STEP = """
from functools import partial
from specahead.kernels.compiling import note_launch
from specahead.lab.benchmarks.random_models import random_decoder, random_scales
from specahead.lab.benchmarks.shapes import Shape
from specahead.engine.steps.announcing import Announcer
from specahead.engine.kv.cache import KVCache
from specahead.engine.steps.pass_runner import PassRunner
from specahead.engine.steps.grouping import StepLimits
from specahead.engine.steps.shapes import JudgeShape, PassShape, ReadShape, RoundShape
from specahead.engine.steps.read_memories import ReadMemories
from specahead.engine.steps.reads import PagedModel
from specahead.engine.steps.round_runner import RoundRunner
from specahead.engine.steps.device_chain import DeviceChain
from specahead.engine.steps.requests import RoundSettings
from specahead.kernels.prompt_attention import merge_in_all_ways

shape = Shape(2, 1024, 16, 2, 64, 2048, 4096)
decoder = random_decoder(shape, 8192, "cpu")
light = decoder.with_eight_bit_weights()
announcer = Announcer(torch.randint(32, (4, 3), dtype=torch.int32), torch.rand(4, 3))
settings = RoundSettings(6, 64, 16, 0.1, 1, 4, announcer)
chain = DeviceChain.make(8, torch.device("cpu")).with_drafts(8, 6, 4, (4, 7))
reads = ReadShape(16, groups=100, decay=0.9)
step = PassShape(2, 10, 5, 400, judges_drafts=True, read=reads, judge=JudgeShape())
round_ = RoundShape(2, 2, 400, sampled=False, announces=True, gamma=6, chained=True)

def round_and_step(scales):  # what they launch, and what they would write
    kv = KVCache(2, 2, 64, 600, torch.bfloat16, "cpu", scales=scales)
    kv.keep_group_means(64)
    rounds = RoundRunner(PagedModel(light, kv, "triton"), settings, 4096, 400, captures=False)
    steps = PassRunner(decoder, kv, StepLimits(400, 5, 16, 4096), ReadMemories(8), False)
    rounds.chain = steps.chain = chain
    buffers = rounds._make_buffers(round_)
    makers = [lambda: partial(rounds._launch, round_, None, buffers), partial(steps.launches_of, step)]
    return makers, (*kv.k_pages, *kv.v_pages, buffers.results._device)

noted = set()

def note_first(kernel, args, kwargs):  # one for each choice of arguments that may be missing: others take as long
    variant = kernel.__name__, tuple(value is None for value in (*args, *kwargs.values()))
    if variant not in noted:
        noted.add(variant)
        note_launch(kernel, args, kwargs)

backends.note_launch = note_first
with torch.inference_mode():
    merges = partial(merge_in_all_ways, 16, 64, torch.bfloat16, torch.device("cpu"))
    (in_16_bits, pages), (in_8_bits, more) = map(round_and_step, (None, random_scales(shape, "cpu")))
    compile_ahead([*in_16_bits, *in_8_bits, lambda: merges])
assert not any(part.view(torch.uint8).any() for part in (*pages, *more))
"""

# Kernels are noted and do nothing, and what is captured runs on the CPU at once. Memory that is not written is 0.
A_START = """
from functools import partial
import specahead.engine.steps.graphs, specahead.kernels.compiling
from specahead.lab.benchmarks.random_models import random_decoder
from specahead.lab.benchmarks.shapes import Shape
from draft_service.drafter import Drafter
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.pass_runner import PassRunner
from specahead.kernels.compiling import Launch, compiles_only, note_launch, without_places
from specahead.sparsity.plan import uniform_plan
from target_service.draft_in_target import StepsByTurns
from target_service.verifier import Verifier
from tests.settings import target_settings

foreseen, launched, compiled = set(), set(), iter(range(100))

def note(kernel, *args, grid, warmup, **kwargs):
    if compiles_only():
        note_launch(kernel, args, kwargs)
        args, kwargs = without_places(args), dict(zip(kwargs, without_places(tuple(kwargs.values()))))
    binder = kernel.device_caches[0][-1]
    _, specialized, options = binder(*args, debug=False, **kwargs)
    (foreseen if compiles_only() else launched).add((kernel.__name__, str(specialized), str(options)))

def zeroed(make):
    return lambda *args, **kwargs: make(*args, **kwargs) if compiles_only() else make(*args, **kwargs).zero_()

backends._Kernel.run = note
specahead.kernels.compiling._compiled = lambda: next(compiled)
specahead.kernels.compiling._running_compilers = lambda: SimpleNamespace(
    compile=lambda *launch: SimpleNamespace(result=lambda: 0)
)
Launch.compile = lambda launch, launcher: None
specahead.engine.steps.graphs.Graphs._capture = lambda graphs, captured: captured.launch()
torch.cuda.graph_pool_handle = torch.cuda.memory_reserved = lambda: 0
torch.empty, torch.empty_like, torch.Tensor.new_empty = map(
    zeroed, (torch.empty, torch.empty_like, torch.Tensor.new_empty)
)

def runner_of(shape, quantization="none", **how):
    decoder, pages = random_decoder(shape, 2048, "cpu", quantization=quantization), 300
    kv = KVCache(shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim, pages, torch.bfloat16, "cpu")
    light = decoder.with_eight_bit_weights()
    runner = ModelRunner(decoder, kv, shape.vocab_size, 1024, drafting=light, **how)
    runner._captures = runner._joins = runner.chains_steps = runner._shapes.chains_steps = True
    runner.passes = PassRunner(decoder, kv, runner._limits, runner.passes.memories, True, light)
    runner._warm_up._passes = runner.passes
    return runner

limits = {"gamma": None, "max_sessions": 2, "max_context": 1024}
settings = target_settings(
    placement="together", max_gamma=2, draft_read_share=0.1, hold=None,
    screening_quantization="fp8", **limits,
)
alone = target_settings(draft="self", max_gamma=4, draft_quantization="fp8", **limits | {"max_sessions": 1})
plan, shape = uniform_plan(3, 2, 1, 8), Shape(3, 512, 8, 2, 64, 1024, 512)
target = runner_of(shape, step_queries=3, most_queries=settings.widest_round)
verifier = Verifier(target, plan, settings)
drafter = Drafter(runner_of(Shape(1, 256, 8, 4, 64, 512, 512)), plan, settings.own_draft)
StepsByTurns(verifier, drafter)
verifier.warm_up()
drafter.warm_up()
Verifier(runner_of(shape, step_queries=5), plan, alone).warm_up()
print(len(launched), "launched at a start, not foreseen:", sorted({name for name, *_ in launched - foreseen}))
assert len(launched) > 100

attention = {"partial_attention_kernel", "merge_kernel", "_tile_starts_kernel"}  # a GPU has cuDNN for it
for runner, tokens in ((target, 300), (runner_of(shape, "int4"), 300), (runner_of(shape, "fp8-blocks"), 100)):
    launched.clear()
    with torch.inference_mode():
        specahead.kernels.compiling.compile_ahead([partial(runner.passes.launches_of_prompt, tokens)])
    runner.forward([SequenceInput(SequenceKV(), [0] * tokens)])
    print(len(launched), "by a prompt:", sorted({name for name, *_ in launched - foreseen} - attention))
"""

ONE_LAUNCH = """
from specahead.kernels import compiling
from specahead.kernels.rejection import drawing, nucleus, positions
from specahead.kernels.rms_norm import _add_rms_norm_kernel, add_rms_norm

modules = positions, nucleus, drawing
functions = [each for module in modules for each in vars(module).values() if isinstance(each, backends._Kernel)]

def keys(order):
    for each in functions:
        each.hash, each.used_global_vals = None, {}
    return {each.__name__: each.cache_key for each in order}

assert len(functions) > 10
assert keys(functions) == keys(functions[::-1])  # whichever was asked for first

compiling.MOST_PROCESSES = 1
compiling.begin_compiling("cpu")
assert not compiling._compilers
compiling.begin_compiling("cuda")  # nothing was compiled yet
(begun,) = compiling._compilers
compiling.end_compiling()
assert [process.returncode for process in begun._processes] == [0] * len(begun._processes) != []

hidden, weight = torch.rand(4, 64), torch.rand(64)
before = hidden.clone()
launch = lambda: add_rms_norm(hidden, hidden, weight, 1e-5, "triton")
made = []
makers = [lambda index=index: made.append(index) or launch for index in range(13)]
compile_ahead(makers)
assert len(made) == 13
compiled = _add_rms_norm_kernel.device_caches[0][0]
(first,) = compiled
_add_rms_norm_kernel.warmup(
    *(hidden, hidden, weight, torch.empty_like(hidden), torch.empty_like(hidden)), 64, 64, 1e-5, 1.0, 4,
    PARTS=1, SIZE=64, num_warps=4, PDL=True, launch_pdl=True, grid=(4,),
)
assert list(compiled) == [first], list(compiled)
assert torch.equal(hidden, before)
compiling.begin_compiling("cuda")
assert not compiling._compilers
compile_ahead(makers)  # what was compiled is hardly gone through again
assert len(made) == 13 + 7, made
"""

# Of the second one on kernels are compiled by processes, which know those of a module.
FAULTS = """
import sys, traceback
sys.path.insert(0, {folder!r})
from faulty_kernel import kernel
from specahead.kernels.compiling import end_compiling

def launch(*sizes):
    for size in sizes:
        kernel[(1,)](torch.zeros(1), SIZE=size)

try:
    compile_ahead([lambda: lambda: launch(9)])
except Exception:
    print("too many" in traceback.format_exc())
compile_ahead([lambda: lambda: launch(1, 2, 3)])
print(len(kernel.device_caches[0][0]))
try:
    compile_ahead([lambda: lambda: launch(4, 9, 5)])
finally:
    end_compiling()
"""

FAULTY_KERNEL = """
from specahead.kernels.backends import jit, tl

@jit
def kernel(x_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 8, "too many")
    tl.store(x_ptr, SIZE)
"""


def run_on_a_gpu(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a script with kernels that are compiled for a GPU, to `cache` in a folder."""
    given = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    file = folder / "script.py"  # a kernel's source is read from its file
    file.write_text(ON_A_GPU + script)
    path = os.pathsep.join(filter(None, (os.getcwd(), given.get("PYTHONPATH"))))
    command = [sys.executable, str(file)]
    return subprocess.run(
        command, env=given | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.timeout(300)
def test_a_round_and_a_step_compile_and_write_nothing(tmp_path: Path) -> None:
    """All that a draft's round launches, and a step of its target behind it, is compiled, with what launches it: over
    KV in 16 and in 8 bits. Nothing of it runs."""
    run = run_on_a_gpu(A_ROUND_AND_A_STEP, tmp_path)
    assert run.returncode == 0, run.stderr
    names = {file.stem for file in tmp_path.glob("cache/*/*.cubin")}
    assert {file.name.removeprefix("launcher-") for file in tmp_path.glob("cache/launcher-*")} == names
    assert names >= {
        *("_add_rms_norm_kernel", "_advance_rows_kernel", "_copy_drafts_kernel", "_few_rows_linear_kernel"),
        *("_flags_kernel", "_greedy_verdict_kernel", "_merge_attended_kernel", "_pass_positions_kernel"),
        *("_remember_weights_kernel", "_rotate_and_write_kv_kernel", "_score_announced_kernel", "_score_blocks_kernel"),
        *("_score_own_blocks_kernel", "_values_kernel", "bracket_kernel", "emit_kernel", "merge_kernel"),
        *("partial_attention_kernel", "threshold_kernel"),
    }


def test_a_start_launches_what_it_has_compiled_ahead(tmp_path: Path) -> None:
    """Anything else would be compiled one by one, while requests wait."""
    run = run_on_a_gpu(A_START, tmp_path)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    start, *prompts = run.stdout.splitlines()
    assert start.endswith("not foreseen: []") and len(prompts) == 3
    assert all(prompt.endswith("by a prompt: []") for prompt in prompts)


def test_what_is_compiled_ahead_is_found_where_it_is_launched_and_by_later_processes(tmp_path: Path) -> None:
    run = run_on_a_gpu(ONE_LAUNCH, tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_kernel_that_does_not_compile_raises_its_error(tmp_path: Path) -> None:
    """In this process, which compiles the first kernel that is new alone, and in another."""
    (tmp_path / "faulty_kernel.py").write_text(FAULTY_KERNEL)
    run = run_on_a_gpu(FAULTS.format(folder=str(tmp_path)), tmp_path)
    assert run.returncode == 1
    assert run.stdout == "True\n1\n"
    assert "RuntimeError: kernel of faulty_kernel does not compile" in run.stderr
    assert "too many" in run.stderr
    assert len(list(tmp_path.glob("cache/*/kernel.cubin"))) in (4, 5)


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    (tmp_path / "faulty_kernel.py").write_text("import os\nos._exit(3)\n")
    folders = patch.object(sys, "path", [*sys.path, str(tmp_path)])
    with folders:
        compilers = Compilers(1)
    try:
        with pytest.raises(RuntimeError, match=r"kernel of faulty_kernel does not compile: the process .* has ended"):
            compilers.compile(Launch("faulty_kernel", "kernel", (), ()), None, None).result()
    finally:
        compilers.close()
