"""Models whose linear layers are held in 8 bits by --quantization, and the quantizations that are refused."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from specahead.config import ModelSettings, TargetSettings
from specahead.engine.loading import fused
from specahead.engine.loading.memory import bytes_of_weights
from specahead.engine.loading.model import LoadedModel, load_model
from specahead.engine.loading.opening import open_model
from specahead.engine.model import quantization
from specahead.engine.model.quantization import Storage
from specahead.kernels.linear import MOST_ROWS, EightBitWeight, LinearWeight, quantize
from target_service.service import open_models
from tests.unit.tiny_models import logits_of_prompt, sizes

SIZES = sizes(8, 2, hidden_size=128, intermediate_size=256, max_position_embeddings=512, tie_word_embeddings=False)
BY_CHANNEL: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> LoadedModel:
    return load_model(str(folder), dtype, "cpu", **how)


def linears_of(loaded: LoadedModel) -> list[LinearWeight]:
    decoder = loaded.decoder
    return [*(weight for layer in decoder.layers for weight in layer.linears), decoder.lm_head]


def logits(loaded: LoadedModel, tokens: int) -> Tensor:
    return logits_of_prompt(
        loaded, torch.randint(0, 97, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    )


# At load


@pytest.mark.parametrize("tied", [False, True])
def test_every_linear_layer_is_kept_in_8_bits_alone(tied: bool, tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": tied})).save_pretrained(
        tmp_path
    )
    whole, held = load(tmp_path, torch.bfloat16), load(tmp_path, torch.bfloat16, quantization="fp8")
    (*layers, head), (*of_whole, of_head) = linears_of(held), linears_of(whole)
    for one, other in zip(layers, of_whole, strict=True):
        assert isinstance(one.values, EightBitWeight) and isinstance(other.values, Tensor) and one.eight_bit is None
        rounded = quantize(other.values)
        assert torch.equal(one.values.values.view(torch.uint8), rounded.values.view(torch.uint8))
        assert torch.equal(one.values.scales, rounded.scales) and one.dtype == torch.bfloat16
    assert isinstance(head.values, Tensor) and (head.values is held.decoder.embedding) == tied
    assert torch.equal(head.values, of_head.values)
    numbers, rows = sum(each.values.nbytes for each in of_whole) // 2, sum(each.outputs for each in of_whole)
    assert held.decoder.weight_bytes == numbers + 4 * rows + head.values.nbytes
    assert whole.decoder.weight_bytes == 2 * numbers + head.values.nbytes
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    kept = held.decoder.weight_bytes + (0 if tied else held.decoder.embedding.nbytes)
    assert kept == pytest.approx(bytes_of_weights(config, torch.bfloat16, Storage(8)), rel=0.05)
    copied = held.decoder.with_eight_bit_weights()
    assert all(weight.eight_bit is None for layer in copied.layers for weight in layer.linears)


def test_16_bit_weights_are_released_layer_by_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is rounded, the 16-bit numbers of those before it have gone."""
    seen: list[weakref.ref[Tensor]] = []

    def watch(weight: Tensor) -> EightBitWeight:
        assert [each() for each in seen] == [None] * len(seen)
        seen.append(weakref.ref(weight))
        return quantize(weight)

    monkeypatch.setattr(fused, "quantize", watch)
    load(folder, torch.bfloat16, quantization="fp8")
    assert len(seen) == 8 and all(each() is None for each in seen)


def dequantised(folder: Path) -> LoadedModel:
    """The model with weights that are rounded to 8 bits and held as they were."""
    loaded = load(folder)
    with torch.inference_mode():
        for weight in linears_of(loaded)[:-1]:
            weight.values.copy_(quantize(weight.values).in_order())
    return loaded


@pytest.mark.parametrize("tokens", [1, 7, MOST_ROWS])
def test_few_rows_give_what_dequantised_weights_give(folder: Path, tokens: int) -> None:
    held, plain = load(folder, quantization="fp8"), dequantised(folder)
    torch.testing.assert_close(logits(held, tokens), logits(plain, tokens), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(logits(held, tokens), logits(load(folder), tokens), atol=1e-4)


def test_many_rows_round_what_the_layers_read_as_well(folder: Path) -> None:
    held, plain = (logits(each, MOST_ROWS + 40) for each in (load(folder, quantization="fp8"), dequantised(folder)))
    assert 5e-3 < (held - plain).norm() / plain.norm() < 0.1


def test_experts_give_what_transformers_gives_by_dequantised_weights(tmp_path: Path) -> None:
    """The router stays as it is."""
    mixture = {"moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | mixture)).eval()
    model.save_pretrained(tmp_path)
    held = load(tmp_path, quantization="fp8")
    for layer in held.decoder.layers:
        assert isinstance(layer.experts.gate_up, EightBitWeight) and isinstance(layer.experts.down, EightBitWeight)
    found, ids = logits(held, 7), torch.randint(0, 97, (7,), generator=torch.Generator().manual_seed(7))[None]
    with torch.no_grad():
        plain = model(ids).logits[0]
        for name, weight in fused.experts_apart({name: each.data for name, each in model.named_parameters()}).items():
            if name.endswith("proj.weight"):
                weight.copy_(quantize(weight).in_order())
        torch.testing.assert_close(found, model(ids).logits[0], atol=1e-4, rtol=1e-3)
    assert not torch.allclose(found, plain, atol=1e-4)
    assert held.decoder.weight_bytes < load(tmp_path).decoder.weight_bytes / 3
    shares = [held.decoder.read_share(rows) for rows in (0, 1, 2, 1000)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)
    assert (shares[1] - shares[0]) / (1 - shares[0]) == pytest.approx(1 / 3)  # 2 of 6 experts
    with pytest.raises(NotImplementedError, match="second copies of weights, in 8 bits, are not built for mixtures"):
        held.decoder.with_eight_bit_weights()


def test_random_weights_are_held_in_8_bits_too(folder: Path) -> None:
    held = linears_of(load(folder, load_format="dummy", quantization="fp8"))
    assert all(isinstance(each.values, EightBitWeight) for each in held[:-1])


def test_a_target_is_opened_as_its_settings_say_and_its_draft_in_16_bits() -> None:
    settings = TargetSettings(quantization="fp8", placement="together", device="cpu", max_context=200, kv_tokens=320)
    target, draft = open_models(replace(settings, max_sessions=1), 0)
    plain, _ = open_models(replace(settings, quantization="none", draft="none", placement="apart"), 0)
    runners: list[Any] = [target.runner, draft.runner, plain.runner]
    held = [isinstance(each.decoder.layers[0].qkv.values, EightBitWeight) for each in runners]
    assert held == [True, False, False]
    share = runners[0].decoder.weight_bytes / runners[2].decoder.weight_bytes
    assert share < 0.6 and runners[0].weight_tokens == pytest.approx(share * runners[2].weight_tokens)


# Refusals


def changed(**weights: Any) -> dict[str, Any]:
    said = json.loads(json.dumps(BY_CHANNEL))
    said["config_groups"]["group_0"]["weights"] |= weights
    return dict(said)


def packed(format: str = "pack-quantized", input_activations: Any = None, **weights: Any) -> dict[str, Any]:
    said = changed(strategy="group", group_size=128, **weights) | {"format": format}
    said["config_groups"]["group_0"]["input_activations"] = input_activations
    return said


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "fp8 in blocks of 64 x 128"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of the kind e5m2"),
        (changed(strategy="block"), "compressed-tensors float-quantized with weights of 8 float by block"),
        (changed(num_bits=4, type="int", strategy="group"), "weights of 4 int by group"),
        (BY_CHANNEL | {"format": "pack-quantized"}, "compressed-tensors pack-quantized"),
        (BY_CHANNEL | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            BY_CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with a sparsity_config",
        ),
        (BY_CHANNEL | {"transform_config": {"config_groups": {"u": {}}}}, "compressed-tensors with a transform_config"),
        (BY_CHANNEL | {"config_groups": {}}, "with config_groups of several kinds, or without any"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "awq in the layout of gemv"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "backend": "llm-awq"}, "awq in the layout of llm-awq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, "awq with weights of 4 bits in groups of 16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq with weights of 8 bits in groups of 128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "gptq with desc_act"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down": {}}}, "gptq with dynamic"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq with is_marlin_format"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq in the layout of marlin"),
        (packed(num_bits=8, type="int"), "pack-quantized with weights of 8 bits"),
        (packed(num_bits=4, type="int", actorder="group"), "pack-quantized with actorder group"),
        (packed(input_activations={"num_bits": 8, "type": "int"}), "pack-quantized with activations of 8 int"),
        (packed(input_activations={"num_bits": 8, "type": "int"}, format="int-quantized"), "int-quantized with activ"),
        *(({"quant_method": method}, method) for method in ("bitsandbytes", "gguf", "auto-round", "modelopt", "mxfp4")),
    ],
)
def test_quantizations_that_are_not_built_are_refused_by_name(folder: Path, said: dict[str, Any], named: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    for refused in (lambda: load(folder), lambda: open_model(ModelSettings(model=str(folder), device="cpu"))):
        with pytest.raises(NotImplementedError, match=f"{named}.*which is not built; built are 8-bit floats"):
            refused()


@pytest.mark.parametrize(
    ("model", "dtype", "capability", "named"),
    [
        ("llama", torch.bfloat16, (8, 0), "below 8.9"),
        ("llama", torch.float32, (9, 0), "float32"),
        ("llama", torch.float16, (9, 0), r"results in torch\.float16"),
        ("odd", torch.bfloat16, (9, 0), "layers of 192 inputs, which is no multiple of 128"),
        ("olmo2", torch.bfloat16, (9, 0), "do not norm"),
    ],
)
def test_models_and_gpus_that_no_kernel_takes_are_refused(
    model: str, dtype: torch.dtype, capability: tuple[int, int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sizes = SIZES | ({"intermediate_size": 192} if model == "odd" else {})
    config = transformers.Olmo2Config(**sizes) if model == "olmo2" else transformers.LlamaConfig(**sizes)
    with pytest.raises(NotImplementedError, match=named):
        quantization.check_storage(config, Storage(8), dtype, "cuda")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(**SIZES)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="gpt_neox: weights in 8 bits are not built for the architecture"):
        load(tmp_path, quantization="fp8")
