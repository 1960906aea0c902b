"""How much KV a service makes room for, and what it loads."""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig

from specahead import models
from specahead.config import ModelSettings
from specahead.engine.kv.pages import KEPT_SHARE, pages_for
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading import memory, model, opening
from specahead.engine.loading.config import ModelShape, load_shape
from specahead.engine.loading.memory import room_for_kv
from specahead.engine.loading.model import load_model, resolve_dtype
from specahead.engine.loading.opening import EightBit, open_model
from specahead.engine.loading.tokenizer import load_generation_config, load_tokenizer
from specahead.engine.model.decoder import Decoder
from specahead.engine.parallel.ranks import Ranks
from specahead.engine.steps.grouping import MAX_OVERHANG
from specahead.engine.steps.model_runner import ModelRunner

SHAPE = ModelShape(4, 4, 2, 64, 4096, 8192)
A_TOKEN = 2 * 4 * 2 * 64 * 4  # bytes, float32
SETTINGS = ModelSettings(model=str(models.DRAFT), device="cpu", max_context=1000, max_sessions=4)


def room(settings: ModelSettings) -> int:
    return room_for_kv(settings, SHAPE, torch.float32, "cpu")


def test_memory_is_turned_into_tokens_but_no_more_than_all_sessions_need() -> None:
    memory = 1500 * A_TOKEN / 2**30
    assert room(replace(SETTINGS, kv_memory=memory)) == pytest.approx(1500, abs=1)
    assert room(replace(SETTINGS, kv_memory=1000.0)) == math.ceil(4 * (1000 + 32) / (1 - KEPT_SHARE))


def test_memory_for_less_than_one_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"KV for 5\d\d tokens fits, a context has 1000.*lower max_context"):
        room(replace(SETTINGS, kv_memory=550 * A_TOKEN / 2**30))


def test_memory_for_less_than_one_context_on_one_rank_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise that rank would end alone, and the others with it, and nobody would say what to change."""
    monkeypatch.setattr(Ranks, "least", lambda self, number: min(number, 550))
    settings = replace(SETTINGS, kv_memory=1500 * A_TOKEN / 2**30, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="KV for 550 tokens fits, a context has 1000"):
        open_model(settings, ranks=Ranks(1, 2))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (
            {"kv_memory": 900.0},
            r"asked for kv_memory of 900\.0 GiB, its weights take 0\.0 GiB, and this machine has 23\.0",
        ),
        ({"host_kv_memory": 24.0}, r"asked for host_kv_memory of 24\.0 GiB"),
        ({"kv_memory": 12.0, "host_kv_memory": 11.9}, r"kv_memory of 12\.0 GiB and host_kv_memory of 11\.9 GiB"),
        ({"kv_tokens": 10**8}, r"100000000 tokens of KV of 381\.5 GiB"),
    ],
)
def test_more_memory_than_there_is_is_refused_before_anything_is_loaded(
    asked: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 23 << 30)
    monkeypatch.setattr(opening, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=match):
        open_model(replace(SETTINGS, **asked))


@pytest.mark.gpu
def test_a_gpu_gives_what_its_utilization_leaves() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    settings = replace(SETTINGS, device="cuda", max_sessions=10**6, gpu_memory_utilization=0.5)
    half = room_for_kv(settings, SHAPE, torch.float32, "cuda")
    most = room_for_kv(replace(settings, gpu_memory_utilization=0.9), SHAPE, torch.float32, "cuda")
    assert 0 < half < most < torch.cuda.mem_get_info()[1] / A_TOKEN


def test_dummy_weights_have_the_shape_of_the_config_and_no_others_are_read() -> None:
    dummy = load_model(str(models.DRAFT), torch.float32, "cpu", load_format="dummy")
    real = load_model(str(models.DRAFT), torch.float32, "cpu")
    assert isinstance(dummy.decoder, Decoder) and isinstance(real.decoder, Decoder)
    assert dummy.decoder.weight_bytes == real.decoder.weight_bytes == 4 * (4 * 245760 + 4096 * 128)
    assert dummy.decoder.lm_head.values is dummy.decoder.embedding
    for ours, theirs in zip(dummy.decoder.layers, real.decoder.layers, strict=True):
        assert ours.qkv.values.shape == theirs.qkv.values.shape
        assert not torch.equal(ours.qkv.values, theirs.qkv.values)
        assert ours.gate_up.values.std().item() == pytest.approx(0.02, rel=0.05)
        assert ours.input_norm is not None and bool((ours.input_norm == 1).all())
    assert load_shape(str(models.DRAFT)).num_layers == 4
    with pytest.raises(ValueError, match="auto or dummy"):
        load_model(str(models.DRAFT), torch.float32, "cpu", load_format="random")


@pytest.mark.parametrize(("amx", "large"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_runs_large_models_in_what_it_multiplies_fast(
    amx: bool, large: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "multiplies_bfloat16", lambda: amx)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_key_value_heads": 2}
    LlamaConfig(vocab_size=9000, num_attention_heads=8, **sizes).save_pretrained(tmp_path)
    GPTNeoXConfig(hidden_size=1024, num_hidden_layers=8, vocab_size=9000).save_pretrained(tmp_path / "other")
    for name in (tmp_path, tmp_path / "other"):
        assert resolve_dtype("auto", "cpu", str(name)) is large
    assert resolve_dtype("auto", "cpu", str(models.TARGET)) is torch.float32, "it would take as long"
    assert resolve_dtype("auto", "cuda", str(models.TARGET)) is torch.bfloat16
    assert resolve_dtype("float32", "cpu", str(tmp_path)) is torch.float32
    with pytest.raises(ValueError, match="dtype 'int8': expected auto"):
        resolve_dtype("int8", "cpu", str(tmp_path))


# Tiers

TARGET_TOKEN = 2 * 10 * 4 * 64 * 4  # bytes


def tiered(tokens: int, **changes: Any) -> ModelSettings:
    """The bundled target with a backing store for so many tokens."""
    settings = ModelSettings(model=str(models.TARGET), device="cpu", max_context=640, kv_tokens=320)
    return replace(settings, host_kv_memory=tokens * TARGET_TOKEN / 2**30, **changes)


def test_a_model_is_opened_over_tiers() -> None:
    runner = open_model(tiered(800)).runner
    assert isinstance(runner.kv, TieredKV)
    assert (runner.kv.resident.count, runner.kv.pool.num_pages) == (20, 50)
    assert runner.kv.memory.staged_pages == pages_for(640 + MAX_OVERHANG)
    assert not isinstance(open_model(replace(tiered(800), host_kv_memory=0.0)).runner.kv, TieredKV)


@pytest.mark.parametrize(
    ("tokens", "changes", "match"),
    [
        (639, {}, "KV for 639 tokens fits on the host.* a context has 640.* raise host_kv_memory"),
        (800, {"kv_tokens": 801}, "KV for 800 tokens fits on the host.* the device has room for 801"),
    ],
)
def test_a_backing_store_that_does_not_hold_a_context_or_the_device_is_refused(
    tokens: int, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        open_model(tiered(tokens, **changes))


@pytest.mark.parametrize("eight_bit", ["none", "all", "drafting"])
def test_weights_are_held_in_eight_bits_for_the_passes_that_read_them_so(eight_bit: EightBit) -> None:
    runner = open_model(SETTINGS, eight_bit).runner
    assert isinstance(runner, ModelRunner) and isinstance(runner.decoder, Decoder)
    drafting = runner.passes.model.drafting
    assert (runner.decoder.lm_head.eight_bit is not None) == (eight_bit == "all")
    assert (drafting is not None) == (eight_bit == "drafting")
    if drafting is not None:
        ours, theirs = drafting.layers[0].qkv, runner.decoder.layers[0].qkv
        assert ours.eight_bit is not None and ours.values is theirs.values and theirs.eight_bit is None


def test_a_feature_that_is_not_built_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded; on a CPU, and with enforce_eager, transformers' own modules run it."""
    monkeypatch.setattr(opening, "unbuilt_feature", lambda *_, **__: "hats")
    with pytest.raises(NotImplementedError, match="no CUDA graphs are built for hats; pass --enforce-eager"):
        open_model(replace(SETTINGS, device="cuda"))
    assert open_model(SETTINGS).shape.num_layers == 4


def load_weights(folder: str) -> object:
    return load_model(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("config.json", load_shape),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer_config.json", load_tokenizer),
        ("generation_config.json", load_generation_config),
        ("model.safetensors", load_weights),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, load: Callable[[str], Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.TARGET, folder)
    (folder / name).write_text("{nothing")
    with pytest.raises((OSError, ValueError), match=re.escape(str(folder / name))):
        load(str(folder))


def test_a_model_needs_no_generation_config(tmp_path: Path) -> None:
    assert load_generation_config(str(tmp_path)) == {}
