"""A causal LM on its device: its decoder, its sizes, its dtype; and how it gets there.

The weights of a model that the fused decoder runs are read from its safetensors files without transformers' modules,
whose import takes seconds. All else goes through these: other models, and a checkpoint whose names do not fit, such as
one of an older release, which transformers may know how to read.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from specahead.config.sections import LOAD_FORMATS
from specahead.engine.loading.checkpoint import Checkpoint, RandomWeights, find_files
from specahead.engine.loading.config import load_config
from specahead.engine.loading.fused import misfit, read_decoder
from specahead.engine.loading.shape import ModelShape, read_shape
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.families import HEAD, count_parameters, unbuilt_feature, weight_shapes
from specahead.engine.model.modules import ModulesDecoder

log = logging.getLogger(__name__)

SMALL_MODEL = 100_000_000  # parameters, whose weights take little time to read and multiply


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, without KV. weight_bytes: what its weights take."""

    decoder: Decoder | ModulesDecoder
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int

    def with_vocabulary(self, count: int) -> "LoadedModel":
        """Return the model cut to the logits of the ids below `count`; no more than there are.

        Models of one tokenizer may differ in how far their vocabularies are padded (Qwen2.5-0.5B has 151,936 rows, 7B
        has 152,064). Cut to the ids that the tokenizer has, they fit each other. What is sampled then follows the
        model's distribution over real tokens: rows of padding, which the softmax would have counted, are not computed.
        """
        count = min(count, self.shape.vocab_size)
        return replace(self, decoder=self.decoder.with_vocabulary(count), shape=replace(self.shape, vocab_size=count))


def load_model(model: str, dtype: torch.dtype, device: str, load_format: str = "auto") -> LoadedModel:
    """Return the causal LM in a folder or of a Hugging Face id; code from the hub is never run.

    Weights are read from safetensors only, straight to the device. load_format "dummy": random weights in the shape of
    the model's config, for measurements. Raises ValueError for another format, and for weights that are not those of
    the config's model; NotImplementedError for attention that is not built; what transformers raises for a model that
    it cannot load.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r}: expected {' or '.join(LOAD_FORMATS)}")
    config = load_config(model)
    if unbuilt_feature(config, on_gpu=device != "cpu") is not None:
        return load_modules(model, dtype, device, load_format)
    shape = read_shape(config)
    dummy = load_format == "dummy"
    weights = RandomWeights(config, dtype, device) if dummy else _weights_of(model, config, dtype, device)
    decoder = read_decoder(config, weights, dtype, device)
    of_weights = weight_shapes(config)
    if decoder.lm_head is decoder.embedding:
        del of_weights[HEAD]
    held = sum(map(prod, of_weights.values())) * dtype.itemsize
    return LoadedModel(decoder, shape, dtype, decoder.norm.device, held)


def load_modules(model: str, dtype: torch.dtype, device: str, load_format: str = "auto") -> LoadedModel:
    """Return a causal LM of any architecture, run by transformers' own modules. Raises as `load_model`."""
    from specahead.engine.loading.module import load_module  # imports much

    module: Any = load_module(model, dtype, device, load_format=load_format)
    shape, parameters = read_shape(module.config), list(module.parameters())
    heads = shape.num_heads, shape.num_kv_heads, _attention_scale(module, shape)
    decoder = ModulesDecoder(module, shape.num_layers, *heads, shape.vocab_size)
    held = sum(parameter.nbytes for parameter in parameters)
    return LoadedModel(decoder, shape, parameters[0].dtype, parameters[0].device, held)


def _weights_of(model: str, config: Any, dtype: torch.dtype, device: str) -> Mapping[str, Tensor]:
    """Return the weights of a model by name: those of its files, or as transformers reads these if they do not fit."""
    try:
        checkpoint = Checkpoint(find_files(model), device)
        why = misfit(config, checkpoint.shapes)
    except OSError as error:
        why = str(error)
    if why is None:
        return checkpoint
    log.info("transformers is to read the weights", extra={"model": model, "why": why})
    from specahead.engine.loading.module import load_module  # imports much

    # Not to the device, which would hold them beside the decoder.
    weights = dict(load_module(model, dtype, "cpu").named_parameters())
    why = misfit(config, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    if why is not None:
        raise ValueError(f"{model}: {why}")
    return weights


def _attention_scale(module: nn.Module, shape: ModelShape) -> float:
    """Return what attention's scores are multiplied by. Raises NotImplementedError where layers differ in that."""
    layers: list[Any] = list(module.modules())
    scales = {float(m.scaling) for m in layers if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    if len(scales) > 1:
        raise NotImplementedError(f"layers scale attention by {sorted(scales)}, not all alike")
    return scales.pop() if scales else shape.head_dim**-0.5


def multiplies_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 faster than float32: in tiles (Intel's AMX)."""
    return torch.cpu._is_amx_tile_supported()


def default_device() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(name: str, device: str, model: str) -> torch.dtype:
    """Return the dtype of that name. `auto`: bfloat16 on a GPU, and on a CPU that multiplies it in tiles (AMX); but
    float32 there for a model of up to SMALL_MODEL parameters, whose passes take as long in either; else float32.

    model: folder or Hugging Face id. Raises ValueError for another name.
    """
    if name == "auto":
        fast = device != "cpu" or (multiplies_bfloat16() and count_parameters(load_config(model)) > SMALL_MODEL)
        return torch.bfloat16 if fast else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r}: expected auto, {', '.join(dtypes)}")
    return dtypes[name]
