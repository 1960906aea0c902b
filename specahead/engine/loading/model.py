"""Loads a causal LM onto its device.

Models of the families that the fused decoder runs are read from their safetensors files without transformers' modules,
whose import takes seconds. Other models run by these modules; and where the names in a checkpoint do not fit, as in one
of an older release, transformers reads the weights.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from specahead.config.speculation import Quantization
from specahead.engine.loading.checkpoint import Checkpoint, RandomWeights, find_files
from specahead.engine.loading.config import ModelShape, load_config, read_shape
from specahead.engine.loading.fused import experts_apart, misfit, read_decoder
from specahead.engine.loading.own_part import unbuilt_in_ranks
from specahead.engine.loading.packed import PackedCheckpoint
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.families import count_parameters, unbuilt_feature, weight_shapes
from specahead.engine.model.head_config import is_head
from specahead.engine.model.modules import NAME, ModulesDecoder, attend_in_pass
from specahead.engine.model.quantization import Storage, check_storage, storage_of
from specahead.engine.parallel.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy")
SMALL_MODEL = 100_000_000  # parameters; up to it a CPU's passes take as long in bfloat16 as in float32


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run but for its KV."""

    decoder: Decoder | ModulesDecoder
    shape: ModelShape
    """Of the whole model, whatever part of it this rank runs."""
    dtype: torch.dtype
    device: torch.device

    def with_vocabulary(self, count: int) -> "LoadedModel":
        """Return the model cut to the logits of the ids below `count`, or of all ids if it has fewer.

        Models of one tokenizer may pad their vocabularies differently (Qwen2.5-0.5B has 151,936 rows, 7B has 152,064).
        Cut to the ids that the tokenizer has, they fit each other, and tokens are sampled from the distribution over
        real tokens: rows of padding are not computed.
        """
        count = min(count, self.shape.vocab_size)
        return replace(self, decoder=self.decoder.with_vocabulary(count), shape=replace(self.shape, vocab_size=count))


def load_model(
    model: str,
    dtype: torch.dtype,
    device: str,
    load_format: str = "auto",
    quantization: Quantization = "none",
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Return the causal LM in a folder or of a Hugging Face id; code from the hub is never run.

    Weights are read from safetensors only, straight to the device.
    load_format: "auto", or "dummy" for random weights in the shape of the config, for measurements.
    quantization: "fp8" holds linear layers but the head in 8 bits; "none" holds all as the checkpoint does.
    ranks: that run the model together; the part of this one is loaded.
    Raises ValueError for another format and for weights that do not fit the config, NotImplementedError for attention
    or a quantization that is not built and for a head, and what transformers raises for a model that it cannot load.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r}: expected {' or '.join(LOAD_FORMATS)}")
    config = load_config(model)
    if is_head(config):
        raise NotImplementedError(
            f"{model}: a head drafts on the hidden states of its target, in the target's process: give it as --draft, "
            "with --placement together"
        )
    check_ranks(model, config, device, ranks.count)
    held = storage_of(config, quantization)
    check_storage(config, held, dtype, device, ranks.count)
    if unbuilt_feature(config, on_gpu=device != "cpu") is not None:
        return load_modules(model, dtype, device, load_format)
    shape = read_shape(config)
    dummy = load_format == "dummy"
    weights = RandomWeights(config, dtype, device, held) if dummy else _weights_of(model, config, dtype, device)
    rounds = quantization == "fp8" or (dummy and held == Storage(8))
    decoder = read_decoder(config, weights, dtype, device, rounds, ranks)
    return LoadedModel(decoder, shape, dtype, decoder.norm.device)


def check_ranks(model: str, config: Any, device: str, count: int) -> None:
    """Raise NotImplementedError for a model that cannot be split over `count` ranks."""
    if count == 1:
        return
    why = unbuilt_feature(config, on_gpu=device != "cpu") or unbuilt_in_ranks(config, count)
    if why is not None:
        raise NotImplementedError(
            f"{model}: --tensor-parallel-size {count} is not built for {why}: leave it out, or give a number of GPUs "
            "that divides heads, KV heads and columns of the MLP, or of each expert"
        )


def load_modules(model: str, dtype: torch.dtype, device: str, load_format: str = "auto") -> LoadedModel:
    """Return a causal LM of any architecture, run by transformers' own modules. Raises as `load_model`."""
    module: Any = load_module(model, dtype, device, load_format=load_format)
    shape, parameters = read_shape(module.config), list(module.parameters())
    heads = shape.num_heads, shape.num_kv_heads, _attention_scale(module, shape)
    decoder = ModulesDecoder(module, shape.num_layers, *heads, shape.vocab_size)
    return LoadedModel(decoder, shape, parameters[0].dtype, parameters[0].device)


def load_module(
    model: str, dtype: torch.dtype, device: str, attention_name: str = NAME, load_format: str = "auto"
) -> nn.Module:
    """Return a causal LM as transformers' own module. Arguments and errors are those of `load_model`.

    attention_name: the attention that transformers looks up; by default the one that runs over paged KV.
    Raises ValueError also for a checkpoint that lacks weights, which transformers would make up.
    """
    # Importing these takes seconds: transformers' modelling code imports torch._dynamo and much else.
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(NAME, attend_in_pass)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention_name, "trust_remote_code": False}
    if load_format == "dummy":
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, **options).eval()
    if device != "cpu":
        options["device_map"] = device
    options |= {"use_safetensors": True, "output_loading_info": True}
    module, loaded = AutoModelForCausalLM.from_pretrained(model, **options)
    if loaded["missing_keys"]:
        raise ValueError(f"{model}: its checkpoint has no {', '.join(sorted(loaded['missing_keys'])[:3])}")
    return module.eval()


def _weights_of(model: str, config: Any, dtype: torch.dtype, device: str) -> Mapping[str, Tensor]:
    """Return the weights of a model by name, from its files; if these do not fit, as transformers reads them."""
    held = storage_of(config)
    try:
        files, of_layout = find_files(model), (held.layout, weight_shapes(config))
        checkpoint = PackedCheckpoint(files, device, *of_layout) if held.bits < 16 else Checkpoint(files, device)
        why = misfit(config, checkpoint.shapes)
    except OSError as error:
        why = str(error)
    if why is None:
        return checkpoint
    if held.bits < 16:
        raise ValueError(f"{model}: {why}")
    log.info("the files do not fit the config: transformers reads the weights", extra={"model": model, "why": why})
    try:  # not to the device, which would hold them beside the decoder
        weights = experts_apart(dict(load_module(model, dtype, "cpu").named_parameters()))
    except SafetensorError:  # which names no file
        raise OSError(why) from None
    why = misfit(config, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    if why is not None:
        raise ValueError(f"{model}: {why}")
    return weights


def _attention_scale(module: nn.Module, shape: ModelShape) -> float:
    """Return the number that scores of attention are multiplied by; raise NotImplementedError if layers differ."""
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
    """Return the dtype that `name` says, for a model in a folder or of a Hugging Face id.

    `auto` is bfloat16 on a GPU, and on a CPU that multiplies it in tiles if the model has more than SMALL_MODEL
    parameters; else float32. Raises ValueError for an unknown name.
    """
    if name == "auto":
        fast = device != "cpu" or (multiplies_bfloat16() and count_parameters(load_config(model)) > SMALL_MODEL)
        return torch.bfloat16 if fast else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r}: expected auto, {', '.join(dtypes)}")
    return dtypes[name]
