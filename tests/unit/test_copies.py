"""Which second copies of weights in 8 bits a service makes where its settings leave that open."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specahead.config import DraftSettings, Speculation, TargetSettings
from specahead.engine.loading import copies, memory
from specahead.engine.loading.copies import choose_copies, fitting

GIB = 2**30
TOGETHER = TargetSettings(device="cuda", placement="together", dtype="bfloat16", max_context=8192)
DRAFT = DraftSettings(device="cuda", dtype="bfloat16")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 80 GiB with a target of 8 billion parameters, or another as a test says."""
    gpu = SimpleNamespace(capability=(9, 0), total=80 * GIB, parameters=8 * GIB, config={})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu.capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.total, gpu.total))
    sizes = {"model_type": "llama", "hidden_act": "silu", "num_attention_heads": 32, "head_dim": 128}
    sizes |= {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "num_hidden_layers": 32}
    sizes |= {"max_position_embeddings": 8192, "vocab_size": 4096, "layer_types": None, "tie_word_embeddings": False}
    monkeypatch.setattr(copies, "load_config", lambda model: SimpleNamespace(**sizes | gpu.config))
    for module in (copies, memory):
        monkeypatch.setattr(module, "count_parameters", lambda config: gpu.parameters)
    return gpu


def chosen(settings: TargetSettings | DraftSettings) -> tuple[str | None, str | None]:
    said = choose_copies(settings).speculation
    return said.draft_quantization, said.screening_quantization


def test_copies_are_made_where_the_gpu_reads_them_and_has_the_memory(gpu: SimpleNamespace) -> None:
    gpu.parameters = 3 * GIB
    assert chosen(TOGETHER) == ("fp8", "fp8")
    assert chosen(DRAFT) == ("fp8", "none"), "a draft service screens nothing"
    assert chosen(replace(TOGETHER, placement="apart")) == ("none", "fp8"), "its draft runs elsewhere"
    assert chosen(replace(TOGETHER, placement="apart", draft="none")) == ("none", "none"), "nothing is proposed"
    assert chosen(replace(TOGETHER, placement="apart", draft="self")) == ("fp8", "none")
    assert chosen(replace(TOGETHER, deterministic=True)) == ("fp8", "none")
    said = Speculation(draft_quantization="none", screening_quantization="fp8")
    assert chosen(replace(TOGETHER, speculation=said)) == ("none", "fp8"), "what is said stays"


def test_weights_that_are_held_in_8_bits_have_no_copy(gpu: SimpleNamespace) -> None:
    gpu.parameters = 3 * GIB
    held = replace(TOGETHER, quantization="fp8")
    assert chosen(held) == ("fp8", "none"), "the draft is in 16 bits"
    asked = replace(held, placement="apart", speculation=Speculation(screening_quantization="fp8"))
    assert chosen(asked) == ("none", "none"), "steps that screen read 8 bits as it is"
    assert chosen(replace(held, placement="apart", draft="self")) == ("none", "none")
    gpu.config = {"quantization_config": {"quant_method": "fp8"}}
    assert chosen(TOGETHER) == chosen(DRAFT) == ("none", "none"), "checkpoints in 8 bits"


def test_weights_in_8_bits_leave_more_room_for_the_copies_of_a_draft(gpu: SimpleNamespace) -> None:
    gpu.total, gpu.parameters = 50 * GIB, 8 * GIB  # 8 GiB of the copy in a quarter of 50 - 5 - 2 - 16 - 16, or - 8
    assert chosen(TOGETHER) == ("none", "none")
    gpu.total = 65 * GIB
    assert chosen(TOGETHER) == ("none", "none")
    assert chosen(replace(TOGETHER, quantization="fp8")) == ("fp8", "none")


@pytest.mark.parametrize(
    "change",
    [
        {"capability": (8, 0)},
        {"total": 24 * GIB, "parameters": 8 * GIB},
        {"config": {"model_type": "olmo2"}},
        {"config": {"intermediate_size": 14337}},
        {"config": {"hidden_act": "gelu"}},
    ],
)
def test_no_copy_is_made_where_the_gpu_does_not_read_it_or_kv_needs_the_memory(
    gpu: SimpleNamespace, change: dict[str, object]
) -> None:
    vars(gpu).update(change)
    assert chosen(replace(TOGETHER, placement="apart")) == ("none", "none")
    assert chosen(DRAFT) == ("none", "none")


def test_a_cpu_makes_no_copy() -> None:
    assert chosen(replace(TOGETHER, device="cpu")) == ("none", "none")


@pytest.mark.parametrize(
    ("left", "asked", "made"),
    [(80, 0, ["draft", "target"]), (20, 0, ["draft"]), (3, 0, []), (50, 45, ["draft"]), (50, 40, ["draft", "target"])],
)
def test_copies_take_a_quarter_of_what_weights_leave_or_what_the_kv_asked_for_leaves(
    left: float, asked: float, made: list[str]
) -> None:
    assert fitting({"draft": 1, "target": 8}, left, asked) == made
