"""Which transformers architectures engine.decoder runs, and how their weights become its description.

A family is a row of a table: the names of its modules. All else is read from the model's config and modules. The
weights are those of the transformers model, whose modules keep working: they become views of the fused ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.decoder import Decoder, DecoderLayer


@dataclass(frozen=True)
class ModuleNames:
    """How a family names its layers' modules; a norm that it does not have is None.

    qkv, gate_up: the linear layers whose rows are queries, keys, values, and gate, up; one name if they are fused.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    input_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None


FAMILIES = {
    "llama": ModuleNames(),
    "mistral": ModuleNames(),
    "qwen2": ModuleNames(),
    "qwen3": ModuleNames(),
    "granite": ModuleNames(),
    "smollm3": ModuleNames(),
    "phi3": ModuleNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "olmo2": ModuleNames(
        input_norm=None,
        attention_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
    ),
}


def unbuilt_feature(config: Any, on_gpu: bool = False) -> str | None:
    """Return the first thing that the model needs and the fused decoder does not do, or None if it can run it.

    config: of transformers. on_gpu: whether Triton's kernels are to run it.
    """
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    capped = any(getattr(config, name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping"))
    alibi = getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt")
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    activation = getattr(config, "hidden_act", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = sliding_window(config)
    features = {
        "a mixture of experts": experts,
        "softcapping of logits": capped,
        "attention with linear biases (ALiBi)": alibi,
        f"a sliding window of {window} tokens": window,
        f"the architecture {config.model_type} (there is {', '.join(FAMILIES)})": config.model_type not in FAMILIES,
        f"the activation {activation} (there is silu)": activation != "silu",
        "biases in the MLP": getattr(config, "mlp_bias", False),
        f"rotary embedding of kind {rotary}, which depends on a sequence's length": rotary in ("dynamic", "longrope"),
        f"heads of {dim} dimensions (Triton takes powers of two from 16, --attention-backend torch others)": on_gpu
        and (dim < 16 or dim & (dim - 1)),
    }
    return next((feature for feature, needed in features.items() if needed), None)


def sliding_window(config: Any) -> int | None:
    """Return how many tokens back attention reaches, or None if it reaches all that the model's context can hold."""
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return None
    return int(window) if window < config.max_position_embeddings else None


@torch.inference_mode()
def read_decoder(model: nn.Module) -> Decoder:
    """Describe a transformers causal LM, and fuse its weights in place.

    Raises NotImplementedError, naming the feature, for a model that needs more than the fused decoder does.
    """
    config: Any = model.config
    feature = unbuilt_feature(config, next(model.parameters()).is_cuda)
    if feature is not None:
        raise NotImplementedError(
            f"{config.model_type}: the fused decoder is not built for {feature}: use --enforce-eager"
        )
    inner: Any = model.model
    cosines, sines = _rotary_table(inner, config.max_position_embeddings)
    return Decoder(
        embedding=inner.embed_tokens.weight,
        layers=[_read_layer(layer, FAMILIES[config.model_type]) for layer in inner.layers],
        norm=inner.norm.weight,
        lm_head=model.lm_head.weight,  # type: ignore[union-attr,arg-type]
        cosines=cosines,
        sines=sines,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        epsilon=config.rms_norm_eps,
        attention_scale=inner.layers[0].self_attn.scaling,
        embedding_scale=getattr(config, "embedding_multiplier", 1.0),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        logits_scale=1 / getattr(config, "logits_scaling", 1.0),
    )


def _read_layer(layer: Any, names: ModuleNames) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [getattr(attention, name) for name in names.qkv]
    head_norms, full_norms = _read_norms_of_heads(attention)
    return DecoderLayer(
        input_norm=_norm_of(layer, names.input_norm),
        qkv=_fuse([module.weight for module in projections]),
        qkv_bias=None if projections[0].bias is None else torch.cat([module.bias for module in projections]),
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        attention_out_norm=_norm_of(layer, names.attention_out_norm),
        mlp_norm=_norm_of(layer, names.mlp_norm),
        gate_up=_fuse([getattr(mlp, name).weight for name in names.gate_up]),
        down=mlp.down_proj.weight,
        mlp_out_norm=_norm_of(layer, names.mlp_out_norm),
        head_norms=head_norms,
        full_norms=full_norms,
        rotates=bool(getattr(attention, "use_rope", True)),
    )


def _norm_of(layer: Any, name: str | None) -> Tensor | None:
    return None if name is None else getattr(layer, name).weight


def _read_norms_of_heads(attention: Any) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Return head_norms and full_norms of a DecoderLayer: by their length they are of a head or of all heads."""
    if not hasattr(attention, "q_norm"):
        return None, None
    queries, keys = attention.q_norm.weight, attention.k_norm.weight
    if len(queries) == len(keys) == attention.head_dim:
        return torch.stack([queries, keys]), None
    return None, (queries, keys)


def _fuse(weights: list[nn.Parameter]) -> Tensor:
    """Return one matrix of several; the parameters become views of it, so that nothing is held twice."""
    if len(weights) == 1:
        return weights[0].data
    fused = torch.cat([weight.data for weight in weights])
    for weight, part in zip(weights, fused.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return fused


def _rotary_table(inner: Any, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, turned / 2] float32."""
    device = inner.embed_tokens.weight.device
    like = torch.zeros(1, dtype=torch.float32, device=device)
    cosines, sines = inner.rotary_emb(like, torch.arange(positions, device=device)[None])
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
