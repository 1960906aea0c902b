"""Folders of models that have a config in the shape of a real model and no weights, which are random (load_format
dummy)."""

import json
import shutil
from pathlib import Path
from typing import Any

from specahead import models
from specahead.engine.loading.config import load_config
from specahead.engine.model.families import block_rule, count_experts
from specahead.lab.benchmarks.shapes import SHAPES, Shape

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
}
_AS_IN_CONFIG = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def write_model(folder: Path, shape: Shape, vocab: int, context: int) -> None:
    """Write a config of this shape beside the bundled tokenizer. The folder must not exist.

    vocab: tokens of the model, whatever the shape has, since a draft has its target's. context: tokens of a sequence,
    at most.
    """
    shutil.copytree(models.TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape.model_type]],
        **{name: getattr(shape, name) for name in _AS_IN_CONFIG},
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    if shape.experts:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.chosen,
            "moe_intermediate_size": shape.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if shape.sparse_config:
        factors = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}  # of MiniCPM4 and 4.1
        config |= {**factors, "sparse_config": shape.sparse_config}
    if shape.drafted:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": shape.drafted}
    (folder / "config.json").write_text(json.dumps(config))


def read_shape_of(name: str) -> Shape:
    """One of SHAPES, or that of a model's config (folder or Hugging Face id)."""
    if name in SHAPES:
        return SHAPES[name]
    config = load_config(name)
    heads = config.num_attention_heads
    experts = count_experts(config)
    return Shape(
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.moe_intermediate_size if experts else config.intermediate_size,
        config.vocab_size,
        experts,
        config.num_experts_per_tok if experts else 0,
        config.sparse_config if block_rule(config) else None,
        model_type=config.model_type,
        tied=config.tie_word_embeddings,
    )
