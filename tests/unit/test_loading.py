"""How much KV a service makes room for, and what it loads."""

from dataclasses import replace

import pytest
import torch

import models
from engine.loading import DEFAULT_KV_TOKENS, ModelSettings, ModelShape, load_model, load_shape, room_for_kv

SHAPE = ModelShape(4, 4, 2, 64, 4096, 8192)
A_TOKEN = 2 * 4 * 2 * 64 * 4  # bytes, float32
SETTINGS = ModelSettings(str(models.DRAFT), "cpu", max_context=1000, max_sessions=4)


def room(settings: ModelSettings) -> int:
    return room_for_kv(settings, SHAPE, torch.float32, "cpu")


def test_tokens_that_are_asked_for_are_given() -> None:
    assert room(replace(SETTINGS, kv_tokens=77)) == 77


def test_a_cpu_has_a_default_that_holds_one_context() -> None:
    assert room(SETTINGS) == DEFAULT_KV_TOKENS
    assert room(replace(SETTINGS, max_context=1_000_000)) > 1_000_000


def test_memory_is_turned_into_tokens_but_no_more_than_all_sessions_need() -> None:
    memory = 1500 * A_TOKEN / 2**30
    assert room(replace(SETTINGS, kv_memory=memory)) == pytest.approx(1500, abs=1)
    assert room(replace(SETTINGS, kv_memory=1000.0)) == 4 * (1000 + 32)


def test_memory_for_less_than_one_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"KV for 5\d\d tokens fits, a context has 1000.*lower max_context"):
        room(replace(SETTINGS, kv_memory=550 * A_TOKEN / 2**30))


@pytest.mark.gpu
def test_a_gpu_gives_what_its_utilization_leaves() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    settings = replace(SETTINGS, device="cuda", max_sessions=10**6, gpu_memory_utilization=0.5)
    half = room_for_kv(settings, SHAPE, torch.float32, "cuda")
    most = room_for_kv(replace(settings, gpu_memory_utilization=0.9), SHAPE, torch.float32, "cuda")
    assert 0 < half < most < torch.cuda.mem_get_info()[1] / A_TOKEN


def test_dummy_weights_have_the_shape_of_the_config_and_no_others_are_read() -> None:
    model = load_model(str(models.DRAFT), torch.float32, "cpu", load_format="dummy")
    real = load_model(str(models.DRAFT), torch.float32, "cpu")
    ours, theirs = dict(model.named_parameters()), dict(real.named_parameters())
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    assert not torch.equal(next(iter(ours.values())), next(iter(theirs.values())))
    assert load_shape(str(models.DRAFT)).num_layers == 4
    with pytest.raises(ValueError, match="auto or dummy"):
        load_model(str(models.DRAFT), torch.float32, "cpu", load_format="random")
