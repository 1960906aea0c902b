"""Weights that are read from files without transformers' modules are those that transformers would have loaded."""

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from specahead import models
from specahead.engine.loading.checkpoint import RandomWeights
from specahead.engine.loading.config import FamilyConfig, load_config, read_shape
from specahead.engine.loading.fused import experts_apart, read_decoder
from specahead.engine.loading.model import load_model
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.families import FAMILIES, unbuilt_feature, weight_shapes
from specahead.engine.model.quantization import Storage
from specahead.kernels.linear import LinearWeight
from specahead.kernels.mixture import Experts
from tests.programs import printed_by
from tests.unit.tiny_models import CONFIGS, FUSED, SIZES, save_tiny, sizes

TIED = "llama, biases, tied"
HUGE = {"max_shard_size": "20KB"}  # for models as small as these
ROTARY: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def load(folder: Path) -> Decoder:
    return load_model(str(folder), torch.float32, "cpu").decoder


def parts_of(description: Any) -> dict[str, Any]:
    """All that a description holds, by name."""
    return {field.name: getattr(description, field.name) for field in fields(description)}


def check_same(ours: Any, theirs: Any) -> None:
    """Both are Decoders, DecoderLayers, LinearWeights or Experts, with the same numbers to the last bit."""
    for name, one in parts_of(ours).items():
        other = getattr(theirs, name)
        if name == "layers":
            for layer, same in zip(one, other, strict=True):
                check_same(layer, same)
        elif isinstance(one, LinearWeight | Experts):
            check_same(one, other)
        elif name == "full_norms" and one is not None:
            assert all(map(torch.equal, one, other))
        else:
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, name


def of_module(module: Any) -> Decoder:
    """The decoder by what transformers' module holds, whose config is of the family's class."""
    return read_decoder(module.config, experts_apart(dict(module.named_parameters())), torch.float32, "cpu")


@pytest.mark.parametrize("how", [{}, HUGE], ids=["", "in shards"])
@pytest.mark.parametrize("name", FUSED)
def test_weights_in_files_are_those_of_the_module(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    module = save_tiny(CONFIGS[name](), tmp_path, **how)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(how)
    decoder = load(tmp_path)
    check_same(decoder, of_module(module))
    attention = module.model.layers[0].self_attn
    assert decoder.attention_scale == attention.scaling
    names = ("q_proj", "k_proj", "v_proj") if hasattr(attention, "q_proj") else ("qkv_proj",)
    assert torch.equal(decoder.layers[0].qkv.values, torch.cat([getattr(attention, each).weight for each in names]))
    assert (decoder.lm_head.values is decoder.embedding) == module.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["default", *ROTARY])
def test_angles_are_those_of_the_module(kind: str, tmp_path: Path) -> None:
    rotary = {"rope_type": kind, "rope_theta": 5e5, **ROTARY.get(kind, {})}
    module = save_tiny(transformers.LlamaConfig(**sizes(4, 2), rope_parameters=rotary), tmp_path)
    decoder = load(tmp_path)
    cosines, sines = module.model.rotary_emb(torch.zeros(1), torch.arange(SIZES["max_position_embeddings"])[None])
    half = cosines.shape[-1] // 2
    assert torch.equal(decoder.cosines, cosines[0, :, :half]) and torch.equal(decoder.sines, sines[0, :, :half])


# Configs


def read_by_the_family(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", FUSED)
def test_a_config_that_says_all_reads_as_by_its_familys_class(name: str, tmp_path: Path) -> None:
    CONFIGS[name]().save_pretrained(tmp_path)
    ours, theirs = load_config(str(tmp_path)), read_by_the_family(tmp_path)
    assert type(ours) is FamilyConfig and type(theirs) is not FamilyConfig
    assert ours.model_type == theirs.model_type
    assert read_shape(ours) == read_shape(theirs) and weight_shapes(ours) == weight_shapes(theirs)
    assert unbuilt_feature(ours) is unbuilt_feature(theirs) is None
    assert ours.rope_parameters.items() <= theirs.rope_parameters.items()
    weights = RandomWeights(ours, torch.float32, "cpu", Storage())
    made = (read_decoder(config, dict(weights), torch.float32, "cpu") for config in (ours, theirs))
    one, other = (vars(decoder) | {"layers": [layer.rotates for layer in decoder.layers]} for decoder in made)
    for key in set(one) - {"embedding", "norm", "lm_head"}:
        assert torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key], key


@pytest.mark.parametrize("name", FUSED)
def test_what_a_config_leaves_out_is_filled_in_by_its_familys_class(name: str, tmp_path: Path) -> None:
    CONFIGS[name]().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    own = FAMILIES[whole["model_type"]].required
    for key in ("num_key_value_heads", "rope_parameters", "tie_word_embeddings", *own):
        file.write_text(json.dumps({said: value for said, value in whole.items() if said != key}))
        config = load_config(str(tmp_path))
        assert type(config) is type(read_by_the_family(tmp_path)) is not FamilyConfig, key


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_a_config_that_means_more_is_read_by_its_familys_class(change: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIGS["llama"]().to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(load_config(str(tmp_path))) is transformers.LlamaConfig


# Checkpoints that do not fit


def rewrite(folder: Path, change: Any) -> None:
    """Write a checkpoint of one file anew, with what `change` makes of its tensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_a_tied_head_that_differs_is_a_head_of_its_own_as_for_transformers(tmp_path: Path) -> None:
    module = save_tiny(CONFIGS[TIED](), tmp_path)
    embedding = module.model.embed_tokens.weight.data
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": embedding.clone()})
    decoder = load(tmp_path)
    assert decoder.lm_head.values is decoder.embedding
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": 2 * embedding})
    decoder = load(tmp_path)
    assert torch.equal(decoder.lm_head.values, 2 * embedding) and torch.equal(decoder.embedding, embedding)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reference.lm_head.weight, decoder.lm_head.values)


def test_a_weight_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    save_tiny(CONFIGS["qwen2"](), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, lambda tensors: {key: each for key, each in tensors.items() if key != name})
    with pytest.raises(ValueError, match=r"checkpoint has no model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


# What is imported


def test_a_service_of_the_bundled_pair_starts_without_transformers_modelling_code() -> None:
    """It also loads nothing that this code brings, unless transformers' tokenizers do: releases before 5.23 do."""
    program = (
        "import sys\n"
        "from transformers import AutoTokenizer, PreTrainedConfig\n"
        "before = set(sys.modules)\n"
        "import target_service.service\n"
        "from specahead import models\n"
        "from specahead.config import ModelSettings\n"
        "from specahead.engine.loading.opening import open_model\n"
        "open_model(ModelSettings(model=str(models.TARGET), device='cpu', kv_tokens=320, max_context=200))\n"
        "heavy = {'torch._dynamo', 'torch.distributed.tensor', 'transformers.modeling_utils'}\n"
        "print('brought', *(heavy & set(sys.modules)) - before)"
    )
    assert printed_by(program) == "brought\n"


def test_a_model_of_hugging_face_is_found_in_its_cache(tmp_path: Path) -> None:
    """By its id, in shards, and offline."""
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / "0123"
    shutil.copytree(models.DRAFT, snapshot)
    (snapshot / "model.safetensors").unlink()
    transformers.AutoModelForCausalLM.from_pretrained(models.DRAFT).save_pretrained(snapshot, max_shard_size="1MB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    program = (
        "import sys, torch\n"
        "from specahead.engine.loading.model import load_model\n"
        "from specahead.engine.loading.tokenizer import load_tokenizer\n"
        "model = load_model('someone/tiny', torch.float32, 'cpu')\n"
        "print(len(model.decoder.layers), len(load_tokenizer('someone/tiny')))\n"
        "print('transformers.modeling_utils' in sys.modules)"
    )
    where = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert printed_by(program, where) == "4 4096\nFalse\n"
