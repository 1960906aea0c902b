"""What the config of an EAGLE-3 head says: the names and shapes of its weights, and what is not built."""

from math import prod
from typing import Any

from specahead.engine.model.families import Shapes, head_dim, unbuilt_feature

EMBEDDING, IDS, LAYER = "embed_tokens.weight", "d2t", "midlayer."
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_head(config: Any) -> bool:
    """Return whether a config is that of a head, and not of a model by itself. config: of transformers."""
    return bool(_architectures(config)) or hasattr(config, "draft_vocab_size")


def _architectures(config: Any) -> list[str]:
    return [name for name in getattr(config, "architectures", None) or [] if "eagle" in name.lower()]


def unbuilt_in_head(config: Any, on_gpu: bool) -> str | None:
    """Return the first thing that a head needs and that is not built; None if it can run."""
    features = {
        "an architecture other than EAGLE-3": any("eagle3" not in name.lower() for name in _architectures(config))
        or not _nested(config).get("use_aux_hidden_state", True),
        f"{config.num_hidden_layers} layers (there is 1)": config.num_hidden_layers != 1,
        "a norm of each layer's states (fc_norm)": getattr(config, "fc_norm", False)
        or getattr(config, "use_aux_norm", False),
        "a bias of fc": getattr(config, "bias", False),
        "norm_before_residual": getattr(config, "norm_before_residual", False),
        "norm_output": getattr(config, "norm_output", False),
        "parallel drafting": hasattr(config, "ptd_token_id") or getattr(config, "parallel_drafting", False),
        "quantized weights": getattr(config, "quantization_config", None),
        "tied embeddings": config.tie_word_embeddings,
    }
    return next((feature for feature, needed in features.items() if needed), None) or unbuilt_feature(config, on_gpu)


def _nested(config: Any) -> dict[str, Any]:
    return getattr(config, "eagle_config", None) or {}


def layers_read(config: Any, num_layers: int) -> tuple[int, ...]:
    """Return the layers of a target of `num_layers` layers whose inputs a head reads.

    A config may name them: as vLLM reads it by these numbers; in its `eagle_config`, as SGLang reads that, by the
    layers before, whose outputs they are. Raises ValueError for layers that the target does not have.
    """
    own, nested = getattr(config, _LAYER_IDS, None), _nested(config).get(_LAYER_IDS)
    layers = tuple(own or [layer + 1 for layer in nested or []] or (2, num_layers // 2, num_layers - 3))
    if list(layers) != sorted(set(layers)) or not layers[0] >= 0 or layers[-1] >= num_layers:
        raise ValueError(f"the head reads the inputs of layers {layers}: expected rising numbers below {num_layers}")
    return layers


def own_vocabulary(config: Any) -> int:
    """Return how many tokens a head can draft."""
    return int(getattr(config, "draft_vocab_size", None) or config.vocab_size)


def head_shapes(config: Any, read: int) -> Shapes:
    """Return the shapes of a head's weights by name. read: numbers of the target's that `fc` makes a state of.

    The embedding is not among them: where a checkpoint has none, it is the target's.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, head_dim(config)
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    biased, own = getattr(config, "attention_bias", False), own_vocabulary(config)
    shapes: Shapes = {"fc.weight": (hidden, read), "norm.weight": (hidden,), "lm_head.weight": (own, hidden)}
    shapes |= {f"{LAYER}{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    shapes[f"{LAYER}post_attention_layernorm.weight"] = (hidden,)
    for name, rows, columns in (("q", queries, 2 * hidden), ("k", keys, 2 * hidden), ("v", keys, 2 * hidden)):
        shapes[f"{LAYER}self_attn.{name}_proj.weight"] = (rows, columns)
        if biased:
            shapes[f"{LAYER}self_attn.{name}_proj.bias"] = (rows,)
    shapes[f"{LAYER}self_attn.o_proj.weight"] = (hidden, queries)
    if biased:
        shapes[f"{LAYER}self_attn.o_proj.bias"] = (hidden,)
    shapes |= {f"{LAYER}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes[f"{LAYER}mlp.down_proj.weight"] = (hidden, inner)
    return shapes | ({IDS: (own,)} if own < config.vocab_size else {})


def count_head_parameters(config: Any) -> int:
    """Return about how many parameters a head has, without an embedding."""
    return sum(map(prod, head_shapes(config, 3 * config.hidden_size).values()))
