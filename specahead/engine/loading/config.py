"""The config of a model, and the sizes in it.

A config.json that leaves nothing to its family's class is read without that class: each such class imports much of
transformers and torch that serving a fused decoder has no use for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from specahead.engine.model.families import FAMILIES, block_rule, head_dim, sliding_window, unbuilt_feature
from specahead.engine.model.quantization import storage_of
from specahead.models import NATIVE_SPARSE

# Keys that the config.json of every family must have.
_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
_ROTARY = ("default", "llama3")  # kinds that mean the same in each family


class FamilyConfig(PreTrainedConfig):  # type: ignore[misc]
    """A config.json of one of FAMILIES that leaves no value for the family's class to fill in."""

    max_position_embeddings: int = 0
    rope_parameters: dict[str, Any] | None = None


def load_config(model: str) -> Any:
    """Return the transformers config in a folder or of a Hugging Face id; code from the hub is never run.

    Raises NotImplementedError for a checkpoint whose quantization is not built, or one of a family without a class in
    transformers that needs more than is built, and what transformers raises.
    """
    values, _ = PreTrainedConfig.get_config_dict(model)
    if values.get("model_type") == NATIVE_SPARSE:
        raise NotImplementedError(
            f"{model}: native sparse attention (NSA) is not served: attention over learned keys and values of blocks, "
            "windows that begin at any token, and layers of three gated branches are not built; measure the model by "
            "specahead evaluate sharing"
        )
    family = FAMILIES.get(values.get("model_type", ""))
    if family is not None and family.defaults:
        return _config_without_class(model, {**family.defaults, **values})
    if is_complete(values):
        return FamilyConfig.from_dict(values, name_or_path=model)
    if values.get("quantization_config"):
        storage_of(PreTrainedConfig.from_dict(values, name_or_path=model))
    return AutoConfig.from_pretrained(model, trust_remote_code=False)


def _config_without_class(model: str, values: dict[str, Any]) -> Any:
    """Return the config of a model whose family has no class in transformers, so that nothing else can run it."""
    if not is_complete(values):
        raise NotImplementedError(
            f"{model}: models of type {values['model_type']} are built without quantization, with the rotary "
            f"embeddings {', '.join(_rotary_kinds(values))}, and with all sizes in config.json"
        )
    config = FamilyConfig.from_dict(values, name_or_path=model)
    feature = unbuilt_feature(config)
    if feature is not None:
        raise NotImplementedError(f"{model}: a {values['model_type']} with {feature} is not built")
    return config


def is_complete(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json means the same without its family's class, which fills in and changes values."""
    family = FAMILIES.get(values.get("model_type", ""))
    if family is None or any(values.get(name) is None for name in _REQUIRED):
        return False
    rotary = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return (
        all(name in values for name in family.required)
        and not any(values.get(name) for name in ("use_sliding_window", "quantization_config", "per_layer_config"))
        and (rotary.get("rope_theta") or values.get("rope_theta")) is not None
        and rotary.get("rope_type", rotary.get("type", "default")) in _rotary_kinds(values)
    )


def _rotary_kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of rotary embedding that mean the same without the family's class."""
    return (*_ROTARY, "longrope") if values["model_type"] == "minicpm" else _ROTARY


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that services need."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Logits of a row, and so the token ids that may be proposed."""
    max_position_embeddings: int
    chooses_blocks: bool = False
    """Whether the model's own attention chooses the blocks that it reads."""

    def of_rank(self, count: int) -> "ModelShape":
        """Return the sizes of the part that each of `count` ranks runs."""
        return replace(self, num_heads=self.num_heads // count, num_kv_heads=self.num_kv_heads // count)


def read_shape(config: Any) -> ModelShape:
    """Return the sizes in a transformers config.

    Raises NotImplementedError for attention that does not read all tokens before it.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise NotImplementedError(f"{config.model_type}: layers of kind {sorted(kinds)}; only full_attention is built")
    window = sliding_window(config)
    if window is not None:
        raise NotImplementedError(
            f"{config.model_type}: a sliding window of {window} tokens; only attention to all tokens is built, with "
            "--enforce-eager too"
        )
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim(config),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        chooses_blocks=block_rule(config) is not None,
    )


def load_shape(model: str) -> ModelShape:
    """Return the sizes of a model by its folder or Hugging Face id, without its weights. Raises as `read_shape`."""
    return read_shape(load_config(model))
