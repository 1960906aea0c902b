"""The config of a model: as transformers' class for its family reads it, or without that class where it is not needed.

Each such class brings much of transformers and torch that serving a fused decoder has no use for.
"""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from specahead.engine.model.families import FAMILIES

# What the config.json of every family has to say.
_SAYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
_ROTARY = ("default", "llama3")  # kinds that mean the same in each family


class FamilyConfig(PreTrainedConfig):  # type: ignore[misc]
    """A config.json of one of FAMILIES that says itself all that the family's class would fill in."""

    max_position_embeddings: int = 0
    rope_parameters: dict[str, Any] | None = None


def load_config(model: str) -> Any:
    """Return the transformers config in a folder or of a Hugging Face id; code from the hub is never run."""
    values, _ = PreTrainedConfig.get_config_dict(model)
    if says_all(values):
        return FamilyConfig.from_dict(values, name_or_path=model)
    return AutoConfig.from_pretrained(model, trust_remote_code=False)


def says_all(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json leaves nothing to its family's class: neither absent values nor other meanings."""
    family = FAMILIES.get(values.get("model_type", ""))
    if family is None or any(values.get(name) is None for name in _SAYS):
        return False
    rotary = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return (
        all(name in values for name in family.says)
        and not any(values.get(name) for name in ("use_sliding_window", "quantization_config", "per_layer_config"))
        and (rotary.get("rope_theta") or values.get("rope_theta")) is not None
        and rotary.get("rope_type", rotary.get("type", "default")) in _ROTARY
    )
