"""The architectures of transformers that the fused decoder runs: the names and shapes of their weights.

A family is a row of a table; everything else is in the model's config. engine.loading.fused reads the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from specahead.kernels.chosen_blocks import LEAST_DENSE, STRIDE, WINDOW, BlockRule

Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
ROUTER = "mlp.gate.weight"  # of a layer with a mixture of experts
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Family:
    """The names of the parts of a family's layers. A norm that the family does not have is None."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """The linear layers of queries, keys and values; one name if they are fused."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The linear layers of gate and up; one name if they are fused."""
    input_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    bias: Literal["none", "qkv", "config"] = "config"
    """The biases of attention: none; of queries, keys and values; of these and of the output, if the config asks for
    them (attention_bias)."""
    normed: Literal["nothing", "each head", "all heads"] = "nothing"
    """What norms of queries and keys are over."""
    partly_rotary: bool = False
    """Whether the config may have only a part of a head's dimensions rotate."""
    mixed: bool = False
    """Whether each layer has a mixture of experts in place of an MLP."""
    required: tuple[str, ...] = ()
    """Keys that a config.json must have beside those of all families, since the family's class gives their absence a
    meaning of its own (engine.loading.config)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json leaves out, for a family whose class is not in transformers."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(bias="none", required=("sliding_window",)),
    "qwen2": Family(bias="qkv", required=("use_sliding_window",)),
    "qwen3": Family(normed="each head", required=("use_sliding_window", "head_dim")),
    "qwen3_moe": Family(
        normed="each head",
        mixed=True,
        required=(
            *("use_sliding_window", "head_dim", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"),
            *("num_experts_per_tok", "moe_intermediate_size"),
        ),
    ),
    "granite": Family(
        required=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    ),
    "minicpm": Family(
        defaults={
            **{"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "rope_theta": 1e4, "tie_word_embeddings": True},
            **{"hidden_act": "silu", "rms_norm_eps": 1e-6},
        }
    ),
    "smollm3": Family(required=("use_sliding_window", "no_rope_layers")),
    "phi3": Family(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), bias="none", partly_rotary=True),
    "olmo2": Family(
        input_norm=None,
        attention_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
        normed="all heads",
    ),
}


# Of MiniCPM's sparse_config.
_CHOICE_DEFAULTS = {
    **{"kernel_size": WINDOW * STRIDE, "kernel_stride": STRIDE, "init_blocks": 1, "block_size": 64},
    **{"window_size": 2048, "topk": 64, "use_nope": False, "dense_len": 8192},
}


def unbuilt_feature(config: Any, on_gpu: bool = False) -> str | None:
    """Return the first thing that the model needs and the fused decoder does not do, or None if it can run it.

    config: of transformers. on_gpu: whether Triton's kernels are to run it.
    """
    mixed = config.model_type in FAMILIES and FAMILIES[config.model_type].mixed
    capped = any(getattr(config, name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping"))
    alibi = getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt")
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    activation = getattr(config, "hidden_act", None)
    dim = head_dim(config)
    window = sliding_window(config)
    features = {
        "a mixture of experts": count_experts(config) > 0 and not mixed,
        "layers without a mixture beside layers with one": mixed
        and (getattr(config, "decoder_sparse_step", 1) != 1 or bool(getattr(config, "mlp_only_layers", None))),
        "softcapping of logits": capped,
        "attention with linear biases (ALiBi)": alibi,
        f"a sliding window of {window} tokens": window,
        f"the architecture {config.model_type} (there is {', '.join(FAMILIES)})": config.model_type not in FAMILIES,
        f"the activation {activation} (there is silu)": activation != "silu",
        "biases in the MLP": getattr(config, "mlp_bias", False),
        f"rotary embedding of kind {rotary}, which depends on a sequence's length": rotary == "dynamic"
        or (rotary == "longrope" and not scales_by_context(config)),
        f"attention that chooses blocks with {unbuilt_choice(config)}": unbuilt_choice(config) is not None,
        f"heads of {dim} dimensions (Triton takes powers of two from 16)": on_gpu and (dim < 16 or dim & (dim - 1)),
    }
    return next((feature for feature, needed in features.items() if needed), None)


def scales_by_context(config: Any) -> bool:
    """Return whether the model takes the long or the short factors of longrope by the longest context that it allows.

    MiniCPM does; other families take them by the length of a sequence.
    """
    return bool(config.model_type == "minicpm")


def block_rule(config: Any) -> BlockRule | None:
    """Return how the model's own attention chooses blocks (InfLLM-v2 of MiniCPM4); None: it reads everything."""
    said = _sparse_config(config)
    if not said:
        return None
    size, window = said["block_size"], said["window_size"] // said["block_size"]
    return BlockRule(size, said["topk"] + window, said["init_blocks"], window, said["dense_len"])


def unbuilt_choice(config: Any) -> str | None:
    """Return what the config says of choosing blocks that is not built, or None."""
    said = _sparse_config(config)
    if not said:
        return None
    sizes, wanted, size = (said["kernel_size"], said["kernel_stride"]), (WINDOW * STRIDE, STRIDE), said["block_size"]
    refused = {
        "use_nope, by keys that are not rotated": said["use_nope"],
        f"windows of {sizes[0]} tokens, {sizes[1]} apart (there are {wanted[0]}, {wanted[1]} apart)": sizes != wanted,
        f"blocks of {size} tokens (there are powers of two from {STRIDE})": size < STRIDE or size & (size - 1),
        f"a topk of {said['topk']} (it must be more than init_blocks)": said["topk"] <= said["init_blocks"],
        f"a dense_len of {said['dense_len']} (it must be {LEAST_DENSE} or more)": said["dense_len"] < LEAST_DENSE,
    }
    return next((feature for feature, needed in refused.items() if needed), None)


def _sparse_config(config: Any) -> dict[str, Any]:
    """Return MiniCPM's sparse_config with its defaults; empty for a model that has none."""
    said = getattr(config, "sparse_config", None) if config.model_type == "minicpm" else None
    return {**_CHOICE_DEFAULTS, **said} if said else {}


def count_experts(config: Any) -> int:
    """Return the number of experts of a layer; 0: it has an MLP."""
    names = "num_experts", "num_local_experts", "n_routed_experts"
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def inner_size(config: Any) -> int:
    """Return the columns of a model's MLPs, or of each of its experts; config: of one of FAMILIES."""
    return int(config.moe_intermediate_size if FAMILIES[config.model_type].mixed else config.intermediate_size)


def head_dim(config: Any) -> int:
    """Return the dimensions of a head of attention."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: Any) -> int | None:
    """Return how many tokens back attention reaches, or None if it reaches the whole context of the model."""
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return None
    return int(window) if window < config.max_position_embeddings else None


def weight_shapes(config: Any) -> Shapes:
    """Return the shapes of all weights that a checkpoint of one of FAMILIES has, by name.

    The head is among them also where it is tied to the embedding, and a checkpoint need not have it.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    layer = _layer_shapes(config, FAMILIES[config.model_type])
    return {
        EMBEDDING: (vocab, hidden),
        **{
            f"{layer_name(index)}{name}": shape
            for index in range(config.num_hidden_layers)
            for name, shape in layer.items()
        },
        NORM: (hidden,),
        HEAD: (vocab, hidden),
    }


def count_parameters(config: Any) -> int:
    """Return how many parameters a model has: exactly for one of FAMILIES, about that for others."""
    if unbuilt_feature(config) is not None:
        hidden = int(config.hidden_size)
        return 12 * hidden * hidden * config.num_hidden_layers + config.vocab_size * hidden
    shapes = weight_shapes(config)
    if config.tie_word_embeddings:
        del shapes[HEAD]
    return sum(map(prod, shapes.values()))


def layer_name(index: int) -> str:
    """Return the prefix of the names of a layer's weights."""
    return f"model.layers.{index}."


def expert_name(expert: int, part: str) -> str:
    """Return the name of a weight of an expert within its layer. part: gate, up or down."""
    return f"mlp.experts.{expert}.{part}_proj.weight"


def _expert_shapes(config: Any) -> Shapes:
    hidden, inner, count = config.hidden_size, inner_size(config), count_experts(config)
    parts = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: Shapes = {ROUTER: (count, hidden)}
    return shapes | {expert_name(i, part): shape for i in range(count) for part, shape in parts.items()}


def _layer_shapes(config: Any, family: Family) -> Shapes:
    hidden, inner = config.hidden_size, inner_size(config)
    queries, keys = (heads * head_dim(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    shapes: Shapes = {"self_attn.o_proj.weight": (hidden, queries)}
    biased = family.bias == "qkv" or (family.bias == "config" and getattr(config, "attention_bias", False))
    read: list[tuple[tuple[str, ...], tuple[int, ...]]] = [(family.qkv, (queries, keys, keys))]
    if family.mixed:
        shapes |= _expert_shapes(config)
    else:
        shapes["mlp.down_proj.weight"] = hidden, inner
        read.append((family.gate_up, (inner, inner)))
    for names, rows in read:
        for name, count in zip(names, rows if len(names) > 1 else (sum(rows),), strict=True):
            shapes[f"{name}.weight"] = (count, hidden)
            if biased and names is family.qkv:
                shapes[f"{name}.bias"] = (count,)
    if biased and family.bias == "config":
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if family.normed != "nothing":
        of_queries, of_keys = (queries, keys) if family.normed == "all heads" else (head_dim(config),) * 2
        shapes |= {"self_attn.q_norm.weight": (of_queries,), "self_attn.k_norm.weight": (of_keys,)}
    norms = family.input_norm, family.attention_out_norm, family.mlp_norm, family.mlp_out_norm
    return shapes | {f"{norm}.weight": (hidden,) for norm in norms if norm is not None}
