"""Quantized checkpoints as users have them, written here by the rules of their formats, against transformers' models
that have the numbers for which these stand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.config import load_config
from specahead.engine.loading.memory import bytes_of_weights
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.model.quantization import storage_of
from specahead.engine.parallel.ranks import Ranks
from specahead.engine.steps.inputs import SequenceInput
from specahead.kernels.linear import MOST_ROWS, EightBitWeight, GroupedWeight

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512},
    **{"tie_word_embeddings": False, "pad_token_id": 0},
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
}
# Of a weight [outputs, inputs]: what stands for it in the files, by the last part of the name, and its numbers.
Written = tuple[dict[str, Tensor], Tensor]
LARGEST = 448


def in_eight_bits(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 numbers, and what they stand for. scales: of each weight, in its shape."""
    values = (weight / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values, values.float() * scales


def by_tensor(weight: Tensor) -> Written:
    scale = weight.abs().max() / LARGEST
    values, plain = in_eight_bits(weight, scale)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, plain


def by_channel(weight: Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).bfloat16()
    values, plain = in_eight_bits(weight, scales.float())
    return {"weight": values, "weight_scale": scales}, plain


def by_block(name: str) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        outputs, inputs = weight.shape
        scales = torch.empty(-(-outputs // 128), -(-inputs // 128))
        for row in range(len(scales)):
            for column in range(len(scales[0])):
                block = weight[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
                scales[row, column] = block.abs().max() / LARGEST
        wide = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        values, plain = in_eight_bits(weight, wide)
        return {"weight": values, name: scales}, plain

    return write


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Words of 4-bit integers: of each eight of a row, number order[i] lies at the bits from 4 i on."""
    eights = numbers.to(torch.int64).unflatten(1, (-1, 8))
    words = sum(eights[..., source] << 4 * place for place, source in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def in_four_bits(weight: Tensor, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0 to 15 [outputs, inputs], and scales and zeros [outputs, groups]."""
    groups = weight.unflatten(1, (-1, group or weight.shape[1]))
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((2 * groups.abs().amax(2) if symmetric else most - least) / 15).to(dtype)
    zeros = torch.full_like(scales, 8) if symmetric else (-least / scales).round().clamp(0, 15)
    numbers = (groups / scales.float()[..., None] + zeros.float()[..., None]).round().clamp(0, 15)
    return numbers.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8)


def numbers_of(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = numbers.float().unflatten(1, (scales.shape[1], -1)) - zeros.float()[..., None]
    return (groups * scales.float()[..., None]).flatten(1)


def by_awq(weight: Tensor) -> Written:
    """AutoAWQ, WQLinear_GEMM.from_linear."""
    numbers, scales, zeros = in_four_bits(weight, 64, False, torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    written = {"qweight": packed(numbers.t(), order), "qzeros": packed(zeros.t(), order), "scales": scales.t()}
    return written, numbers_of(numbers, scales, zeros)


def by_gptq(group: int, symmetric: bool, less: int) -> Callable[[Tensor], Written]:
    """AutoGPTQ, QuantLinear.pack; its first layout stores zeros less one."""

    def write(weight: Tensor) -> Written:
        numbers, scales, zeros = in_four_bits(weight, group, symmetric, torch.float16)
        zeros = zeros.clamp(min=less)  # the first layout has no zero of 0
        written = {"qweight": packed(numbers).t(), "qzeros": packed(zeros.t() - less), "scales": scales.t()}
        written["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // (group or weight.shape[1])
        return written, numbers_of(numbers, scales, zeros)

    return write


def by_compressed_tensors(group: int, symmetric: bool, in_words: bool = True) -> Callable[[Tensor], Written]:
    """compressed-tensors, PackQuantizedCompressor. in_words: whether zeros are, as since release 0.10."""

    def write(weight: Tensor) -> Written:
        numbers, scales, zeros = in_four_bits(weight, group, symmetric, torch.bfloat16)
        written = {"weight_packed": packed(numbers), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            signed = (zeros.to(torch.int16) - 8).to(torch.int8)
            written["weight_zero_point"] = packed(zeros.t()).t() if in_words else signed
        return written, numbers_of(numbers, scales, zeros)

    return write


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}},
        **{"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"},
        **{"sparsity_config": {}, "transform_config": {}, "version": "0.12.2"},
    }


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False, "lm_head": False}
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, by_tensor),
    "compressed channel": (compressed("float-quantized", FLOATS | {"strategy": "channel"}, BY_TOKEN), by_channel),
    "fp8 blocks": (BLOCKS | {"modules_to_not_convert": ["lm_head"]}, by_block("weight_scale_inv")),
    "compressed blocks": (
        compressed("float-quantized", FLOATS | {"strategy": "block", "block_structure": [128, 128]}, BY_TOKEN),
        by_block("weight_scale"),
    ),
    "awq": (AWQ, by_awq),
    "gptq": (GPTQ | {"sym": True}, by_gptq(128, True, 1)),
    "gptq of all inputs": (GPTQ | {"group_size": -1}, by_gptq(0, False, 1)),
    "gptq_v2": (GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"}, by_gptq(32, False, 0)),
    "packed": (compressed("pack-quantized", INTEGERS, None), by_compressed_tensors(128, True)),
    "packed asymmetric": (
        compressed("pack-quantized", INTEGERS | {"symmetric": False, "actorder": "weight"}, None),
        by_compressed_tensors(128, False),
    ),
    "packed of an old release": (
        compressed("pack-quantized", INTEGERS | {"symmetric": False, "group_size": 32}, None),
        by_compressed_tensors(32, False, in_words=False),
    ),
    "packed channel": (
        compressed("pack-quantized", INTEGERS | {"strategy": "channel", "group_size": None}, None),
        by_compressed_tensors(0, True),
    ),
}
IN_GROUPS = [form for form in FORMS if form not in ("fp8 tensor", "compressed channel")]
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
    made = model(config(**SIZES | sizes)).eval()
    said, quantize = FORMS[form]
    tensors = {}
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or not any(each in name for each in quantized) or any(each in name for each in kept):
            tensors[name] = parameter.detach()
            continue
        written, parameter.data = quantize(parameter.detach())
        tensors |= {f"{layer}.{each}": tensor.contiguous() for each, tensor in written.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.config.to_dict() | {"quantization_config": said}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return made


def load(folder: Path, **how: Any) -> Any:
    return load_model(str(folder), torch.float32, "cpu", **how)


def check_logits(folder: Path, wanted: Any, tokens: int) -> None:
    ids = torch.randint(0, 96, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    runner = make_runner(load(folder), 1024, max_context=400)
    (output,) = runner.forward([SequenceInput(SequenceKV(), ids, "all")])
    assert output.logits is not None
    with torch.no_grad():
        torch.testing.assert_close(output.logits, wanted(torch.tensor([ids])).logits[0], atol=2e-4, rtol=1e-4)


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


@in_groups
def test_random_weights_are_held_alike(tmp_path: Path, form: str) -> None:
    write(tmp_path, form)
    read, made = load(tmp_path), load(tmp_path, load_format="dummy")
    assert made.decoder.weight_bytes == pytest.approx(read.decoder.weight_bytes, rel=0.02)
    values = made.decoder.layers[0].gate_up.values
    assert (
        isinstance(values, GroupedWeight) and values.scales.shape == read.decoder.layers[0].gate_up.values.scales.shape
    )
    assert values.in_order().std() == pytest.approx(0.02, rel=0.2)


@in_groups
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_ranks_hold_their_parts(tmp_path: Path, form: str, family: str) -> None:
    """Rows of queries, keys, values, gates and ups; columns, with their groups, of what reads them."""
    write(tmp_path, form, family, intermediate_size=512)
    decoders = [load(tmp_path), *(load(tmp_path, ranks=Ranks(rank, 2)) for rank in (0, 1))]
    for index in range(2):
        for name, dim, sizes in (
            ("qkv", 0, (256, 64, 64)),
            ("gate_up", 0, (512, 512)),
            ("out", 1, (256,)),
            ("down", 1, (512,)),
        ):
            weights = [getattr(each.decoder.layers[index], name).values for each in decoders]
            assert all(isinstance(each, GroupedWeight) for each in weights)
            assert weights[1].words.numel() * 2 == weights[0].words.numel()
            whole, *parts = (each.in_order() for each in weights)
            halves = [each.split([size // 2 for size in sizes], dim) for each in parts]
            assert torch.equal(torch.cat([half for pair in zip(*halves, strict=True) for half in pair], dim), whole)


# Refusals


def test_a_rank_with_a_part_of_a_group_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "fp8 blocks")
    with pytest.raises(NotImplementedError, match="in 8 bits are not built for layers of 320 inputs, which is no mult"):
        load(tmp_path, ranks=Ranks(0, 2))


@in_groups
def test_layers_that_are_one_here_are_quantized_together(tmp_path: Path, form: str) -> None:
    write(tmp_path, form, kept=("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"))
    with pytest.raises(ValueError, match=r"0\.self_attn\.q_proj\.weight_scale is missing: layers that read the same"):
        load(tmp_path)
    write(tmp_path, form, kept=("layers.1.mlp.up_proj",))
    with pytest.raises(ValueError, match=r"1\.mlp\.up_proj\.weight_scale is missing: layers that read the same"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("form", "kind", "change", "error", "message"),
    [
        ("gptq", "g_idx", lambda index: index.flip(0), NotImplementedError, "groups of inputs out of order"),
        ("awq", "qzeros", None, ValueError, "weight_zero_point is missing: layers that read the same"),
        ("gptq", "qzeros", None, ValueError, "weight_zero_point is missing: layers that read the same"),
        ("packed", "weight_packed", lambda words: words[:, :-1], ValueError, r"weight is \[.*\], and by the config"),
        ("awq", "scales", lambda scales: scales[:, :9], ValueError, "weight_scale is .*expected one for each"),
        ("packed", "weight_scale", lambda scales: scales.repeat(1, 8), ValueError, "256 inputs in 16 groups: expected"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, form: str, kind: str, change: Any, error: type[Exception], message: str
) -> None:
    write(tmp_path, form)
    file, name = tmp_path / "model.safetensors", f"model.layers.1.self_attn.o_proj.{kind}"
    tensors = load_file(file)
    tensor = tensors.pop(name)
    save_file(tensors | ({} if change is None else {name: change(tensor).contiguous()}), file, {"format": "pt"})
    with pytest.raises(error, match=message):
        load(tmp_path)


def test_a_head_that_is_quantized_too_is_held_so(tmp_path: Path) -> None:
    """GPTQ has a setting for it. Here it is cut to fewer ids, as those of a tokenizer."""
    wanted = write(tmp_path, "gptq", vocab_size=96, kept=(), quantized=("proj", "lm_head"))
    loaded = load(tmp_path)
    assert isinstance(loaded.decoder.lm_head.values, GroupedWeight)
    check_logits(tmp_path, wanted, 3)
    cut = loaded.with_vocabulary(40).decoder.lm_head.values
    assert torch.equal(cut.in_order(), loaded.decoder.lm_head.values.in_order()[:40])
