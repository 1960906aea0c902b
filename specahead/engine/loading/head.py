"""Loads an EAGLE-3 head (engine.model.head) from a checkpoint in the form of SGLang's and vLLM's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specahead.engine.loading.checkpoint import Checkpoint, find_files
from specahead.engine.loading.config import load_config, read_shape
from specahead.engine.loading.fused import rotary_table
from specahead.engine.loading.model import LoadedModel
from specahead.engine.model.decoder import Decoder, DecoderLayer
from specahead.engine.model.families import Shapes, head_dim
from specahead.engine.model.head import DraftHead, StateTap
from specahead.engine.model.head_config import EMBEDDING, IDS, LAYER, head_shapes, layers_read, unbuilt_in_head
from specahead.kernels.linear import LinearWeight

_UNUSED = "t2d", "rotary_emb.inv_freq"  # t2d says what d2t says


def load_head(model: str, target: LoadedModel, load_format: str = "auto") -> tuple[LoadedModel, StateTap]:
    """Return a head, and the tap that takes the states which the head reads from its target.

    model: a folder or a Hugging Face id. The whole head lies on the target's device, in the target's dtype. It drafts
    the target's tokens, and uses the target's embedding if its checkpoint has none. Call `with_states` on the result
    for room for states.
    load_format: "auto", or "dummy" for random weights, for measurements.
    Raises NotImplementedError for a head or a target that is not built, naming the reason; ValueError for weights that
    do not fit the config or the target.
    """
    config, device = load_config(model), str(target.device)
    decoder = _check_built(model, config, target)
    layers, hidden = layers_read(config, decoder.num_layers), decoder.embedding.shape[1]
    shapes = head_shapes(config, len(layers) * hidden) | {EMBEDDING: (config.vocab_size, config.hidden_size)}
    tensors = _random(config, target.dtype, device, shapes) if load_format == "dummy" else _read(model, device, shapes)
    if EMBEDDING not in tensors and config.hidden_size != hidden:
        found = f"that of the target has {hidden} columns, expected {config.hidden_size}"
        raise ValueError(f"{model}: it has no embedding, and {found}; give a head of this target")

    def take(*names: str) -> Tensor:
        return torch.cat([tensors[name]().to(device, target.dtype) for name in names])

    def linear(*names: str) -> LinearWeight:
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in shapes]
        return LinearWeight(take(*(f"{name}.weight" for name in names)), take(*biases) if biases else None)

    of_target = target.shape
    config.max_position_embeddings = max(config.max_position_embeddings, of_target.max_position_embeddings)
    cosines, sines = rotary_table(config, device)
    ids = _target_ids(tensors, shapes["lm_head.weight"][0], device)
    known = ids < of_target.vocab_size  # the others pad the target's vocabulary
    head = DraftHead(
        embedding=take(EMBEDDING) if EMBEDDING in tensors else decoder.embedding,
        layers=[
            DecoderLayer(
                input_norm=take(f"{LAYER}input_layernorm.weight"),
                qkv=linear(*(f"{LAYER}self_attn.{name}_proj" for name in "qkv")),
                out=linear(f"{LAYER}self_attn.o_proj"),
                mlp_norm=take(f"{LAYER}post_attention_layernorm.weight"),
                gate_up=linear(f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"),
                down=linear(f"{LAYER}mlp.down_proj"),
            )
        ],
        norm=take("norm.weight"),
        lm_head=LinearWeight(take("lm_head.weight")[known]),
        cosines=cosines,
        sines=sines,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        epsilon=config.rms_norm_eps,
        attention_scale=head_dim(config) ** -0.5,
        hidden_norm=take(f"{LAYER}hidden_norm.weight"),
        own_ids=ids[known],
        vocab_size=of_target.vocab_size,
        states=torch.empty(0, config.hidden_size, dtype=target.dtype, device=device),
    )
    of_head = replace(
        read_shape(config), vocab_size=of_target.vocab_size, max_position_embeddings=of_target.max_position_embeddings
    )
    return LoadedModel(head, of_head, target.dtype, target.device), StateTap(layers, take("fc.weight"), head.states)


def with_states(head: LoadedModel, tap: StateTap, places: int) -> tuple[LoadedModel, StateTap]:
    """Return a head and its tap with room for states of all tokens in the target's pages. places: how many tokens."""
    decoder, states = head.decoder, tap.states.new_zeros(places + 1, tap.states.shape[1])
    assert isinstance(decoder, DraftHead)
    return replace(head, decoder=replace(decoder, states=states)), replace(tap, states=states)


def _check_built(model: str, config: Any, target: LoadedModel) -> Decoder:
    """Return the target's decoder; raise NotImplementedError for a head or a target that is not built."""
    unbuilt = unbuilt_in_head(config, on_gpu=str(target.device) != "cpu")
    if unbuilt is not None:
        raise NotImplementedError(f"{model}: heads are not built with {unbuilt}: give another --draft, or none")
    if not isinstance(target.decoder, Decoder):
        raise NotImplementedError(
            f"{model}: heads are built for targets that the fused decoder runs: give another --draft, or none"
        )
    return target.decoder


Weights = Mapping[str, Callable[[], Tensor]]  # what reads or makes each weight, by name


def _target_ids(tensors: Weights, count: int, device: str) -> Tensor:
    """Return the target's id of each of a head's `count` tokens, [count] int64."""
    ids = torch.arange(count, device=device)
    return ids + tensors[IDS]().to(device) if IDS in tensors else ids  # a checkpoint has the differences


def _read(model: str, device: str, shapes: Shapes) -> Weights:
    """Return what reads the weights of a checkpoint, whose names may begin as those of a whole model do.

    Raises ValueError for weights that are missing, unknown, or of another shape; the embedding may be missing.
    """
    checkpoint = Checkpoint(find_files(model), device)
    names = {name.removeprefix("model.").replace("layers.0.", LAYER): name for name in checkpoint}
    found = {name: checkpoint.shapes[old] for name, old in names.items() if not name.endswith(_UNUSED)}
    for name, shape in (shapes | found).items():
        if name not in found and name != EMBEDDING:
            raise ValueError(f"{model}: the head's {name} is missing, expected {list(shape)}")
        if name in found and shape != shapes.get(name):
            expected = f"expected {list(shapes[name])}" if name in shapes else "a head has no such weight"
            raise ValueError(f"{model}: the head's {name} is {list(shape)}, {expected}")
    return {name: partial(checkpoint.__getitem__, names[name]) for name in found}


def _random(config: Any, dtype: torch.dtype, device: str, shapes: Shapes) -> Weights:
    """Return what makes random weights on a device, as RandomWeights does; the head drafts the first of all tokens."""
    generator = torch.Generator(device).manual_seed(0)
    deviation = getattr(config, "initializer_range", 0.02)

    def make(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, deviation, generator=generator)

    return {name: partial(make, shape) for name, shape in shapes.items() if name not in (IDS, EMBEDDING)}
