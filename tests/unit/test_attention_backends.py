"""What attends: the engine with prompts read in pieces against the engine without, and by torch in place of Triton."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.model import layer_attention
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.backends import Backend
from specahead.kernels.prompt_attention import attend_to_prompts
from specahead.kernels.prompt_reads import Ends
from tests.books import random_tokens
from tests.unit.exact_reads import read_exactly
from tests.unit.tiny_models import save_tiny, sizes

VOCAB, LAYERS, KV_HEADS = 97, 3, 2
SIZES = sizes(8, KV_HEADS, hidden_size=128, num_hidden_layers=LAYERS, head_dim=64, max_position_embeddings=512)
tokens = partial(random_tokens, vocab=VOCAB)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    save_tiny(transformers.LlamaConfig(**SIZES), tmp_path)
    return str(tmp_path)


def lists_with_own_blocks(length: int, count: int, seed: int, dense_layer: bool) -> SparseRead:
    blocks = -(-length // 16)
    generator = torch.Generator().manual_seed(seed)
    chosen: list[Tensor | None] = [None] if dense_layer else []
    while len(chosen) < LAYERS:
        mask = torch.rand(KV_HEADS, blocks, generator=generator) < 0.5
        mask[:, (length - count) // 16 :] = True
        chosen.append(mask)
    return read_exactly(chosen, 16)


def drive(runner: ModelRunner) -> list[SequenceOutput]:
    """Prompts and steps of several shapes, dense and over lists, judged: all outputs in order."""
    lengths = [130, 17, 40, 70, 90]
    sequences = [SequenceKV() for _ in lengths]
    outputs: list[SequenceOutput] = []

    def step(places: list[int], count: int, ragged: bool = False, **rest: Any) -> None:
        inputs = []
        for i in places:
            kv, n = sequences[i], max(1, count - (i if ragged else 0))
            of_input = dict(rest)
            seed = len(outputs) + i
            if "read" in rest:
                of_input["read"] = lists_with_own_blocks(kv.length + n, n, seed, rest["read"])
            if "drafted" in rest:
                chosen = tokens(n, seed)
                of_input["drafted"] = Drafted(chosen[1:], [], Sampling(0.0), kv.length + 1)
            inputs.append(SequenceInput(kv, tokens(n, seed), "all", **of_input))
        outputs.extend(runner.forward(inputs))

    outputs.extend(
        runner.forward([SequenceInput(kv, tokens(n, n), "last") for kv, n in zip(sequences, lengths, strict=True)])
    )
    step([0, 1], 60)  # the rest of a prompt, over KV that is there
    step([0, 1, 2], 5)
    step([2], 1)
    step([0, 1, 2, 3, 4], 5, ragged=True)
    step([4, 2, 0], 1)
    step([0, 3], 4, read=True)
    step([0, 1, 2], 5, ragged=True, read=False)
    step([3, 4], 5)
    step([0, 1, 2], 5, drafted=True)
    step([0, 3], 5, read=True, drafted=True)
    step([0, 1, 2], 5)
    return outputs


def compare(ours: list[SequenceOutput], wanted: list[SequenceOutput], tolerance: float) -> None:
    """tolerance: of the logits' standard deviation."""
    for turn, (one, other) in enumerate(zip(ours, wanted, strict=True)):
        assert (one.logits is None) == (other.logits is None), turn
        if one.logits is not None and other.logits is not None:
            assert (one.logits - other.logits).abs().max() < tolerance * other.logits.std(), turn
        assert (one.verdict is None) == (other.verdict is None)


def runner_of(folder: str, dtype: torch.dtype, device: str, backend: Backend | None = None) -> ModelRunner:
    """backend: what attends, in prompts too; None: the runner's choice."""
    runner = make_runner(load_model(folder, dtype, device), 4096, max_context=400, enforce_eager=backend == "torch")
    if backend is not None:
        passes = runner.passes
        passes.model, passes._cudnn = replace(passes.model, attention=backend), False
    return runner


def test_prompts_are_read_in_pieces(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch in cuDNN's place: what prompts read reaches the pieces as it should, and no step does."""
    calls = []

    def attend(*arguments: Any) -> Tensor:
        calls.append(arguments)
        reads, *others = arguments
        assert reads.cudnn
        return attend_to_prompts(replace(reads, cudnn=False), *others)

    monkeypatch.setattr(layer_attention, "attend_to_prompts", attend)
    wanted = drive(runner_of(folder, torch.float32, "cpu"))
    assert not calls
    runner = runner_of(folder, torch.float32, "cpu")
    runner.passes._cudnn = True
    compare(drive(runner), wanted, 1e-4)
    parts = [[len(ends.parts) for ends in arguments[0].parts if isinstance(ends, Ends)] for arguments in calls]
    assert parts == [[5]] * LAYERS + [[2]] * LAYERS  # the prompts, the rest of two: short ones are read together


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cudnn_reads_prompts_as_triton_does(folder: str) -> None:
    wanted = drive(runner_of(folder, torch.bfloat16, "cuda", "triton"))
    runner = runner_of(folder, torch.bfloat16, "cuda")
    assert runner.passes._cudnn
    compare(drive(runner), wanted, 0.1)
    assert all(captured.graph is not None for captured in runner.passes.graphs.by_shape.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_attends_on_a_gpu_in_eager_steps(folder: str) -> None:
    wanted = drive(runner_of(folder, torch.float32, "cuda"))
    compare(drive(runner_of(folder, torch.float32, "cuda", "torch")), wanted, 1e-2)
