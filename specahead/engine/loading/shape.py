"""The sizes of a model, by its config."""

from dataclasses import dataclass
from typing import Any

from specahead.engine.loading.config import load_config
from specahead.engine.model.families import head_dim, sliding_window


@dataclass(frozen=True)
class ModelShape:
    """The sizes that services need to know. vocab_size: logits of a row, which are the ids that may be proposed."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int


def read_shape(config: Any) -> ModelShape:
    """Return the sizes in a transformers config.

    Raises NotImplementedError for attention that reads less than all tokens before it.
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
    )


def load_shape(model: str) -> ModelShape:
    """Return the sizes of a model by its folder or Hugging Face id, without its weights. Raises as `read_shape`."""
    return read_shape(load_config(model))
