"""Quantized checkpoints as users have them, against transformers' models with the numbers for which these stand."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from specahead import models
from specahead.config import ModelSettings
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.config import load_config
from specahead.engine.loading.fused import experts_apart
from specahead.engine.loading.memory import bytes_of_weights
from specahead.engine.loading.model import load_model
from specahead.engine.loading.opening import open_model
from specahead.engine.loading.packed import PackedCheckpoint
from specahead.engine.model.quantization import storage_of
from specahead.engine.parallel.ranks import Ranks
from specahead.engine.steps.inputs import SequenceInput
from specahead.kernels.linear import MOST_ROWS, EightBitWeight, GroupedWeight
from tests.unit.quantized_forms import AWQ, FORMS, by_awq, from_parts, packed
from tests.unit.tiny_models import logits_of_prompt

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512},
    **{"tie_word_embeddings": False, "pad_token_id": 0},
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
MIXTURE: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
IN_GROUPS = [form for form in FORMS if not form.endswith(("tensor", "transformers", "channel")) or "packed" in form]
every_form = pytest.mark.parametrize("form", FORMS)
in_groups = pytest.mark.parametrize("form", IN_GROUPS)


def write(
    folder: Path,
    form: str,
    family: str = "llama",
    kept: tuple[str, ...] = (),
    quantized: tuple[str, ...] = ("proj",),
    **sizes: Any,
) -> Any:
    """Write a checkpoint; return transformers' model with the numbers that it stands for.

    quantized: what names of layers contain that are, unless they contain one of `kept`.
    """
    config, model = FAMILIES[family]
    torch.manual_seed(0)
    made = model(config(**SIZES | (MIXTURE if family == "qwen3_moe" else {}) | sizes)).eval()
    said, quantize = FORMS[form]
    tensors = {}
    for name, parameter in experts_apart({name: each.data for name, each in made.named_parameters()}).items():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or not any(each in name for each in quantized) or any(each in name for each in kept):
            tensors[name] = parameter
            continue
        written, numbers = quantize(parameter.clone())
        parameter.copy_(numbers)
        tensors |= {f"{layer}.{each}": tensor.contiguous() for each, tensor in written.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.config.to_dict() | {"quantization_config": said}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return made


def load(folder: Path, **how: Any) -> Any:
    return load_model(str(folder), torch.float32, "cpu", **how)


def check_logits(folder: Path, wanted: Any, tokens: int) -> None:
    ids = torch.randint(0, 96, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of_prompt(load(folder), ids), wanted(torch.tensor([ids])).logits[0], atol=2e-4, rtol=1e-4
        )


@every_form
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_numbers_that_a_checkpoint_stands_for(tmp_path: Path, form: str, family: str) -> None:
    check_logits(tmp_path, write(tmp_path, form, family), 9)


@in_groups
def test_prompts_read_the_same_numbers(tmp_path: Path, form: str) -> None:
    check_logits(tmp_path, write(tmp_path, form), MOST_ROWS + 40)


@every_form
def test_layers_are_held_in_the_bits_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    """Except those that it leaves as they are: here the head, and one layer's down_proj."""
    wanted = write(tmp_path, form, kept=("layers.1.mlp.down",))
    decoder = load(tmp_path).decoder
    kinds = [type(weight.values) for layer in decoder.layers for weight in layer.linears]
    kind = GroupedWeight if form in IN_GROUPS else EightBitWeight
    assert kinds == [kind] * 7 + [Tensor] and isinstance(decoder.lm_head.values, Tensor)
    assert torch.equal(decoder.layers[0].down.values.in_order(), wanted.model.layers[0].mlp.down_proj.weight)
    check_logits(tmp_path, wanted, 5)


@every_form
def test_their_bytes_are_foreseen(tmp_path: Path, form: str) -> None:
    write(tmp_path, form, vocab_size=16)
    decoder, config = load(tmp_path).decoder, load_config(str(tmp_path))
    held = storage_of(config)
    bits = 8 * sum(weight.values.nbytes for layer in decoder.layers for weight in layer.linears)
    numbers = 2 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 256 * 640)
    assert bits / numbers == pytest.approx(held.bits, rel=0.2)  # 24 bits more for each 32 weights of 4
    foreseen = bytes_of_weights(config, torch.float32, held) - 2 * 16 * 256 * 4
    assert bits / 8 == pytest.approx(foreseen, rel=0.03)


@every_form
def test_random_weights_are_held_alike(tmp_path: Path, form: str) -> None:
    write(tmp_path, form)
    read, made = load(tmp_path), load(tmp_path, load_format="dummy")
    assert made.decoder.weight_bytes == pytest.approx(read.decoder.weight_bytes, rel=0.02)
    held, values = (each.decoder.layers[0].gate_up.values for each in (read, made))
    assert isinstance(values, GroupedWeight if form in IN_GROUPS else EightBitWeight)
    assert type(values) is type(held) and values.scales.shape == held.scales.shape
    assert values.in_order().std() == pytest.approx(0.02, rel=0.2)


@every_form
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_ranks_hold_their_parts(tmp_path: Path, form: str, family: str) -> None:
    """Rows of queries, keys, values, gates and ups; columns, with their groups, of what reads them."""
    write(tmp_path, form, family, intermediate_size=512)
    decoders = [load(tmp_path), *(load(tmp_path, ranks=Ranks(rank, 2)) for rank in (0, 1))]
    for layers in zip(*(each.decoder.layers for each in decoders), strict=True):
        for name, dim, sizes in (
            ("qkv", 0, (256, 64, 64)),
            ("gate_up", 0, (512, 512)),
            ("out", 1, (256,)),
            ("down", 1, (512,)),
        ):
            whole, *parts = (getattr(layer, name).values for layer in layers)
            assert {type(each) for each in (whole, *parts)} == {GroupedWeight if form in IN_GROUPS else EightBitWeight}
            if form in IN_GROUPS:
                assert parts[0].words.numel() * 2 == whole.words.numel()
            assert torch.equal(from_parts([each.in_order() for each in parts], sizes, dim), whole.in_order())


@given(
    st.sampled_from(["awq", "gptq", "gptq_v2", "packed"]),
    st.integers(1, 5),
    st.integers(0, 7),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_numbers_are_read_as_they_were_packed(layout: str, eights: int, odd: int, groups: int, seed: int) -> None:
    """Outputs that are no eights have zeros in words that are filled up (compressed-tensors)."""
    outputs = 8 * eights + (odd if layout == "packed" else 0)
    how = torch.Generator().manual_seed(seed)
    numbers = torch.randint(16, (outputs, 32 * groups), dtype=torch.uint8, generator=how)
    less = int(layout == "gptq")
    zeros = torch.randint(less, 16, (outputs, groups), dtype=torch.uint8, generator=how)
    scales = torch.rand(outputs, groups, generator=how).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7) if layout == "awq" else tuple(range(8))
    if layout == "packed":
        filled = F.pad(zeros, (0, 0, 0, -outputs % 8))
        written = {
            "weight_packed": packed(numbers),
            "weight_scale": scales,
            "weight_zero_point": packed(filled.t()).t(),
        }
    else:
        words = packed(numbers.t(), order) if layout == "awq" else packed(numbers).t()
        written = {"qweight": words, "scales": scales.t(), "qzeros": packed(zeros.t() - less, order)}
    with TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        save_file({f"a.{name}": tensor.contiguous() for name, tensor in written.items()}, file)
        read = PackedCheckpoint([file], "cpu", layout, ())
        assert sorted(read) == ["a.weight", "a.weight_scale", "a.weight_zero_point"] and len(read) == 3
        assert torch.equal(read["a.weight"], numbers) and torch.equal(read["a.weight_scale"], scales)
        assert torch.equal(read["a.weight_zero_point"][:outputs], zeros)
        assert {name: tuple(read[name].shape) for name in read} == read.shapes
        assert torch.equal(read.part("a.weight", (slice(1, 7), slice(3, 9))), numbers[1:7, 3:9])


def test_a_model_is_opened_with_its_tokenizer(tmp_path: Path) -> None:
    """The bundled draft, in 4 bits: its head is tied to the embedding, and stays in 16 bits."""
    for file in models.DRAFT.iterdir():
        shutil.copy(file, tmp_path)
    config, plain = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    tensors = dict(plain)
    for name in [each for each in plain if each.endswith("proj.weight")]:
        written, plain[name] = by_awq(tensors.pop(name).float())
        tensors |= {name.replace("weight", each): tensor.contiguous() for each, tensor in written.items()}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    how: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": 200, "kv_tokens": 320}
    runner: Any = open_model(ModelSettings(model=str(tmp_path), **how)).runner
    assert isinstance(runner.decoder.layers[0].down.values, GroupedWeight)
    assert runner.decoder.lm_head.values.data_ptr() == runner.decoder.embedding.data_ptr()
    (output,) = runner.forward([SequenceInput(SequenceKV(), [*range(40, 60)], "all")])
    reference = transformers.AutoModelForCausalLM.from_pretrained(models.DRAFT, dtype=torch.float32)
    reference.load_state_dict(plain, strict=False)
    with torch.no_grad():
        wanted = reference(torch.arange(40, 60)[None]).logits[0, :, : output.logits.shape[1]]
    torch.testing.assert_close(output.logits, wanted, atol=1e-3, rtol=1e-3)


# Refusals


def test_a_rank_with_a_part_of_a_group_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "fp8 blocks")
    with pytest.raises(NotImplementedError, match="in 8 bits are not built for layers of 320 inputs, which is no mult"):
        load(tmp_path, ranks=Ranks(0, 2))


@pytest.mark.parametrize("form", [*IN_GROUPS, "compressed channel"])
def test_layers_that_are_one_here_are_quantized_together(tmp_path: Path, form: str) -> None:
    write(tmp_path, form, kept=("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"))
    with pytest.raises(ValueError, match=r"0\.self_attn\.q_proj\.weight_scale is missing: layers that read the same"):
        load(tmp_path)
    write(tmp_path, form, kept=("layers.1.mlp.up_proj",))
    with pytest.raises(ValueError, match=r"1\.mlp\.up_proj\.weight_scale is missing: layers that read the same"):
        load(tmp_path)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    write(tmp_path, "compressed channel")
    asked = ModelSettings(model=str(tmp_path), device="cpu", quantization="fp8")
    for refused in (lambda: load(tmp_path, quantization="fp8"), lambda: open_model(asked)):
        with pytest.raises(ValueError, match="quantized already, by compressed-tensors: leave the flag out"):
            refused()


@pytest.mark.parametrize(
    ("form", "kind", "change", "error", "message"),
    [
        ("gptq", "g_idx", lambda index: index.flip(0), NotImplementedError, "groups of inputs out of order"),
        ("awq", "qzeros", None, ValueError, "weight_zero_point is missing: layers that read the same"),
        ("gptq", "qzeros", None, ValueError, "weight_zero_point is missing: layers that read the same"),
        ("packed", "weight_packed", lambda words: words[:, :-1], ValueError, r"weight is \[.*\], and by the config"),
        ("awq", "scales", lambda scales: scales[:, :9], ValueError, "weight_scale is .*expected one for each"),
        ("packed", "weight_scale", lambda scales: scales.repeat(1, 8), ValueError, "256 inputs in 16 groups: expected"),
        ("compressed channel", "q_proj.weight_scale", None, ValueError, r"q_proj\.weight_scale is missing: layers"),
        ("compressed channel", "k_proj.weight_scale", None, ValueError, r"k_proj\.weight_scale is missing"),
        ("compressed channel", "weight_scale", lambda scales: scales[:2], ValueError, "2 numbers, and .* 256 rows"),
        ("compressed channel", "weight", None, ValueError, r"o_proj\.weight is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, form: str, kind: str, change: Any, error: type[Exception], message: str
) -> None:
    write(tmp_path, form)
    file, name = tmp_path / "model.safetensors", f"model.layers.1.self_attn.{kind if '.' in kind else f'o_proj.{kind}'}"
    tensors = load_file(file)
    given = tensors.pop(name)
    save_file(tensors | ({} if change is None else {name: change(given).contiguous()}), file, {"format": "pt"})
    with pytest.raises(error, match=message):
        load(tmp_path)


def test_biases_of_zeros_that_a_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ saves them. The biases that the model has stay, zeros or not."""
    wanted = write(tmp_path, "gptq", "qwen2")
    file, more = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.bias"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.bias"].zero_()
    wanted.model.layers[0].self_attn.q_proj.bias.data.zero_()
    save_file(tensors | {more: torch.zeros(640)}, file, {"format": "pt"})
    check_logits(tmp_path, wanted, 3)
    save_file(tensors | {more: torch.ones(640)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{more} is none of the weights of qwen2"):
        load(tmp_path)


def test_a_head_that_is_quantized_too_is_held_so(tmp_path: Path) -> None:
    """GPTQ has a setting for it. Here it is cut to fewer ids, as those of a tokenizer."""
    wanted = write(tmp_path, "gptq", vocab_size=96, kept=(), quantized=("proj", "lm_head"))
    loaded = load(tmp_path)
    assert isinstance(loaded.decoder.lm_head.values, GroupedWeight)
    check_logits(tmp_path, wanted, 3)
    cut = loaded.with_vocabulary(40).decoder.lm_head.values
    assert torch.equal(cut.in_order(), loaded.decoder.lm_head.values.in_order()[:40])
