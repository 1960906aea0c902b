"""Makes the fused decoder from the named weights of a model, wherever these come from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specahead.engine.loading.own_part import OwnPart
from specahead.engine.model.decoder import Decoder, DecoderLayer
from specahead.engine.model.families import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    NORM,
    ROUTER,
    Family,
    Shapes,
    block_rule,
    count_experts,
    expert_name,
    head_dim,
    layer_name,
    scales_by_context,
    unbuilt_feature,
    weight_shapes,
)
from specahead.engine.model.quantization import Storage, storage_of
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.kernels.linear import BLOCK, LinearWeight, group_weight, hold, quantize
from specahead.kernels.mixture import Experts, ExpertWeight

# Some releases of transformers wrote this to checkpoints; it is computed here.
_COMPUTED = "rotary_emb.inv_freq"
# Of weights in 8 or 4 bits; those of activations are not read: each row gets its own when it is rounded.
_SCALES = ".weight_scale", ".weight_zero_point", ".input_scale", ".activation_scale"
_EIGHT_BITS, _FOUR_BITS = torch.float8_e4m3fn, torch.uint8
_MIDDLE = 8  # of 4-bit integers


def misfit(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return how these names and shapes differ from those of the weights of the config's model; None if they do not."""
    expected = weight_shapes(config)
    optional = {HEAD} if config.tie_word_embeddings else set()
    missing = [name for name in expected if name not in shapes and name not in optional]
    if missing:
        return f"{missing[0]} is missing, one of {len(missing)} weights"
    for name, shape in shapes.items():
        if name not in expected and not name.endswith((_COMPUTED, *_SCALES)):
            return f"{name} is none of the weights of {config.model_type}"
        if shape != expected.get(name, shape):
            return f"{name} is {list(shape)}, and by the config {list(expected[name])}"
    return None


@torch.inference_mode()
def read_decoder(
    config: Any,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: str,
    rounds: bool = False,
    ranks: Ranks = ALONE,
) -> Decoder:
    """Return the decoder of a model of one of engine.model.families.FAMILIES, with copies of its weights.

    config: of transformers.
    tensors: all weights by name, of any dtype and device. Each is asked for once, so that only one of them need lie on
        the device beside the decoder.
    rounds: whether linear layers but the head are held in 8 bits, also where the tensors are not. Of their 16-bit
        weights only those of one layer lie on the device at a time.
    ranks: that run the model together; the decoder has the part of this rank. `check_ranks` has passed it.
    Raises NotImplementedError, naming the feature, for a model that needs more than the fused decoder does; ValueError
    for a weight of another shape than the config says, or of 8 bits without a scale.
    """
    feature = unbuilt_feature(config, on_gpu=device != "cpu")
    if feature is not None:
        raise NotImplementedError(
            f"{config.model_type}: the fused decoder is not built for {feature}: use --enforce-eager"
        )
    shapes = weight_shapes(config)
    if not ranks.is_alone:
        tensors = part = OwnPart(tensors, config, ranks)
        shapes = part.shapes
    family = FAMILIES[config.model_type]
    weights = _Weights(tensors, shapes, dtype, device, rounds, storage_of(config))
    embedding = weights.take(EMBEDDING)
    cosines, sines = rotary_table(config, device)
    layers = tqdm(range(config.num_hidden_layers), desc="loading weights", unit="layer", leave=False, disable=None)
    return Decoder(
        embedding=embedding,
        layers=[_read_layer(config, index, weights, family) for index in layers],
        norm=weights.take(NORM),
        lm_head=_read_head(config, weights, embedding),
        cosines=cosines,
        sines=sines,
        heads=config.num_attention_heads // ranks.count,
        kv_heads=config.num_key_value_heads // ranks.count,
        epsilon=config.rms_norm_eps,
        attention_scale=getattr(config, "attention_multiplier", head_dim(config) ** -0.5),
        **_scales(config),
        block_rule=block_rule(config),
        ranks=ranks,
    )


def _scales(config: Any) -> dict[str, Any]:
    """Return the factors of embeddings, of what layers add to the stream, and of logits."""
    if config.model_type == "minicpm":
        embedding, residual = config.scale_emb, config.scale_depth / math.sqrt(config.num_hidden_layers)
        logits = config.dim_model_base / config.hidden_size
    else:
        embedding = getattr(config, "embedding_multiplier", 1.0)
        residual = getattr(config, "residual_multiplier", 1.0)
        logits = 1 / getattr(config, "logits_scaling", 1.0)
    return {"embedding_scale": embedding, "residual_scale": residual, "logits_scale": logits}


@dataclass(frozen=True)
class _Weights:
    """The weights of a model, copied to the device in a dtype when they are taken."""

    tensors: Mapping[str, Tensor]
    shapes: Shapes
    dtype: torch.dtype
    device: str
    rounds: bool
    """Whether linear layers but the head are held in 8 bits, also where `tensors` are not."""

    held: Storage
    """How `tensors` hold linear layers that have scales."""

    def linear(self, *names: str) -> LinearWeight:
        """Return the linear layers of these names below one another, as one, in the bits that they are saved in."""
        of_rows, biases, scales = ([f"{name}.{kind}" for name in names] for kind in ("weight", "bias", "weight_scale"))
        bias = self.find(*biases)
        if not any(name in self.tensors for name in scales):
            whole = self.take(*of_rows)
            return LinearWeight(quantize(whole) if self.rounds and of_rows != [HEAD] else whole, bias)
        read = self._of_groups if self.held.in_groups else self._row_scales
        of_each = torch.cat([read(*each) for each in zip(of_rows, scales, strict=True)])
        values = self.take(*of_rows, dtype=_FOUR_BITS if self.held.bits == 4 else _EIGHT_BITS)
        if self.held.in_groups:
            zeros = self._zeros(names, of_each) if self.held.bits == 4 else None
            return LinearWeight(group_weight(values, of_each, zeros, self.dtype), bias)
        return LinearWeight(hold(values, of_each, self.dtype), bias)

    def _scales_of(self, name: str) -> Tensor:
        """Return a tensor that stands beside a weight; raise ValueError if it is missing."""
        if name not in self.tensors:
            raise ValueError(
                f"{name} is missing: layers that read the same (queries, keys and values; gate and up) are one layer "
                "here, and must be quantized all or none"
            )
        return self.tensors[name].to(self.device)

    def _row_scales(self, weight: str, name: str) -> Tensor:
        """Return the scale of each row of a weight, [rows] float32; raise ValueError if there are others, or none."""
        scales, rows = self._scales_of(name).float().flatten(), self.shapes[weight][0]
        if len(scales) not in (1, rows):
            raise ValueError(f"{name} has {len(scales)} numbers, and {weight} {rows} rows: expected as many, or one")
        return scales.expand(rows)

    def _of_groups(self, weight: str, name: str) -> Tensor:
        """Return scales or zeros of a weight's groups, [rows, groups]; raise ValueError if they are missing."""
        numbers, rows = self._scales_of(name), self.shapes[weight][0]
        if not rows <= len(numbers) < rows + BLOCK:  # the last block may be cut
            raise ValueError(f"{name} is {list(numbers.shape)}, and {weight} has {rows} rows: expected one for each")
        return numbers[:rows]

    def _zeros(self, names: tuple[str, ...], scales: Tensor) -> Tensor:
        """Return the zeros of 4-bit integers, in the shape of their scales.

        Symmetric integers of compressed-tensors have none in the files: it is the middle.
        """
        of_names = [f"{name}.weight_zero_point" for name in names]
        if self.held.layout == "packed" and not any(name in self.tensors for name in of_names):
            return torch.full_like(scales, _MIDDLE, dtype=_FOUR_BITS)
        weights = (f"{name}.weight" for name in names)
        return torch.cat([self._of_groups(*each) for each in zip(weights, of_names, strict=True)])

    def take(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return these weights below one another, as one tensor of a dtype, by default the model's.

        Raises ValueError for a weight of another shape, or whose 8 bits mean nothing without a scale.
        """
        dtype = dtype or self.dtype
        rows = [self.shapes[name][0] for name in names]
        whole = torch.empty(sum(rows), *self.shapes[names[0]][1:], dtype=dtype, device=self.device)
        for name, part in zip(names, whole.split(rows), strict=True):
            tensor = self.tensors[name]
            if tensor.shape != part.shape:  # copy_ might repeat it
                raise ValueError(f"{name} is {list(tensor.shape)}, and by the config {list(part.shape)}")
            if tensor.dtype != dtype and {tensor.dtype, dtype} & {_EIGHT_BITS, _FOUR_BITS}:
                raise ValueError(
                    f"{name} is {tensor.dtype}, read as {dtype}: expected weight_scale beside fewer than 16 bits only"
                )
            part.copy_(tensor)
        return whole

    def find(self, *names: str) -> Tensor | None:
        """Return what `take` returns; None if the model has no such weights."""
        return self.take(*names) if names[0] in self.shapes else None


def _read_layer(config: Any, index: int, weights: _Weights, family: Family) -> DecoderLayer:
    before = layer_name(index)
    attention = f"{before}self_attn"

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else weights.take(f"{before}{name}.weight")

    def linear(*names: str) -> LinearWeight:
        return weights.linear(*(f"{before}{name}" for name in names))

    norms = f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"
    rotating = getattr(config, "no_rope_layers", None)  # true where a layer rotates, in spite of its name
    return DecoderLayer(
        input_norm=norm(family.input_norm),
        qkv=linear(*family.qkv),
        out=linear("self_attn.o_proj"),
        attention_out_norm=norm(family.attention_out_norm),
        mlp_norm=norm(family.mlp_norm),
        gate_up=None if family.mixed else linear(*family.gate_up),
        down=None if family.mixed else linear("mlp.down_proj"),
        experts=_read_experts(config, before, weights) if family.mixed else None,
        mlp_out_norm=norm(family.mlp_out_norm),
        head_norms=weights.take(*norms).view(2, -1) if family.normed == "each head" else None,
        full_norms=(weights.take(norms[0]), weights.take(norms[1])) if family.normed == "all heads" else None,
        rotates=rotating is None or bool(rotating[index]),
    )


def _read_experts(config: Any, before: str, weights: _Weights) -> Experts:
    """Return a layer's experts. before: the prefix of the layer's names."""

    def all_of(*parts: str) -> ExpertWeight:
        names = (f"{before}{expert_name(expert, part)}" for expert in range(count_experts(config)) for part in parts)
        return weights.linear(*(name.removesuffix(".weight") for name in names)).values

    gate_up, down = all_of("gate", "up"), all_of("down")
    if type(gate_up) is not type(down):
        raise NotImplementedError(
            f"{before}mlp.experts: gate_proj and up_proj are held in other bits than down_proj, which is not built: "
            "take a checkpoint that has all of them quantized, or none"
        )
    router = weights.take(f"{before}{ROUTER}")
    if not isinstance(gate_up, Tensor) and router.dtype == torch.bfloat16:
        router = router.half()  # rows come in its dtype, and kernels multiply weights of fewer bits in this one
    return Experts(router, gate_up, down, config.num_experts_per_tok, config.norm_topk_prob)


def experts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of transformers' module, where a layer's experts are one, by the names in checkpoints."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, _, kind = name.rpartition("mlp.experts.")
        parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(kind)
        if parts is None:
            apart[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            own = zip(parts, weight.chunk(len(parts)), strict=True)
            apart |= {f"{before}{expert_name(expert, part)}": part_of_it for part, part_of_it in own}
    return apart


def _read_head(config: Any, weights: _Weights, embedding: Tensor) -> LinearWeight:
    """Return the head: the embedding itself if the two are tied, unless a checkpoint has another head.

    Transformers does the same.
    """
    if not config.tie_word_embeddings:
        return weights.linear(HEAD.removesuffix(".weight"))
    if HEAD not in weights.tensors:
        return LinearWeight(embedding)
    head = weights.take(HEAD)
    return LinearWeight(embedding if torch.equal(head, embedding) else head)


def rotary_table(config: Any, device: str) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [positions, rotated / 2] float32 each."""
    rotary = config.rope_parameters
    if rotary["rope_type"] == "longrope" and scales_by_context(config):
        speeds, scale = _long_speeds(config)
    elif rotary["rope_type"] == "default":
        share = rotary.get("partial_rotary_factor", 1.0) if FAMILIES[config.model_type].partly_rotary else 1.0
        turned = int(head_dim(config) * share)
        speeds, scale = 1.0 / rotary["rope_theta"] ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned), 1.0
    else:
        speeds, scale = ROPE_INIT_FUNCTIONS[rotary["rope_type"]](config)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
    angles = positions[:, None] * speeds.to(device, torch.float32)
    return angles.cos() * scale, angles.sin() * scale


def _long_speeds(config: Any) -> tuple[Tensor, float]:
    """Return how fast each pair of dimensions turns, and the factor of cosines and sines, by MiniCPM's longrope
    (MiniCPMLongRoPE in modeling_minicpm.py).
    """
    rotary, dim, longest = config.rope_parameters, head_dim(config), config.max_position_embeddings
    original = rotary["original_max_position_embeddings"]
    factors = torch.tensor(rotary["long_factor" if longest > original else "short_factor"], dtype=torch.float32)
    speeds = 1.0 / rotary["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return speeds / factors, math.sqrt(1 + math.log(longest / original) / math.log(original))
