"""What a service opens before it serves: a model that fits its settings, with KV."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from specahead.config import DraftSettings, ModelSettings
from specahead.config.attention_backends import check_attention_backend
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.loading.any_order import with_sums_in_any_order
from specahead.engine.loading.config import load_config
from specahead.engine.loading.eight_bit import with_eight_bit_weights
from specahead.engine.loading.memory import backing_store_tokens, bytes_of_token, check_memory, context_of, room_for_kv
from specahead.engine.loading.model import LoadedModel, default_device, load_model, resolve_dtype
from specahead.engine.loading.runner import make_runner
from specahead.engine.loading.shape import ModelShape, read_shape
from specahead.engine.loading.tokenizer import (
    count_token_ids,
    load_generation_config,
    load_tokenizer,
    stop_token_ids,
    tokenizer_hash,
)
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.families import count_parameters, unbuilt_feature
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.steps.runner import Runner
from specahead.kernels.compiling import begin_compiling

# No passes, all of few rows, or of these what a later pass judges: those that draft for the model itself, or screen.
EightBit = Literal["none", "all", "drafting"]


@dataclass(frozen=True)
class OpenedModel:
    """grammars: what compiles those of sessions, for the model's tokenizer."""

    runner: Runner
    shape: ModelShape
    tokenizer_hash: str
    grammars: Grammars


@dataclass(frozen=True)
class _Loaded:
    """A model on its device, without KV yet. drafting: the decoder with 8-bit weights with which it drafts for itself,
    if it does so."""

    settings: ModelSettings
    model: LoadedModel
    tokenizer: Any
    drafting: Decoder | None
    device: str

    def room(self, beside: int = 0) -> int:
        """Return the tokens of KV to make room for, once all weights are loaded (specahead.engine.loading.memory)."""
        return room_for_kv(self.settings, self.model.shape, self.model.dtype, self.device, beside)


def open_model(settings: ModelSettings, eight_bit: EightBit = "none") -> OpenedModel:
    """Load a model as the settings say, with logits of its tokenizer's ids alone, and make room for its KV.

    eight_bit: which passes of few rows read the weights in 8 bits (specahead.engine.loading.eight_bit).
    Raises ValueError or NotImplementedError for settings that do not fit each other, the model or the device, and
    what transformers raises for a model that it cannot load.
    """
    loaded = _load(settings, eight_bit)
    return _open(loaded, loaded.room())


def open_both(
    settings: ModelSettings, beside: ModelSettings, eight_bit: EightBit, of_second: EightBit
) -> tuple[OpenedModel, OpenedModel]:
    """Load two models on one device, and make room for as much KV of the second as of the first, and for its rounds.

    eight_bit, of_second: as of `open_model`, which says what this raises, of each model.
    """
    second, first = _load(beside, of_second), _load(settings, eight_bit)
    tokens = first.room(bytes_of_token(second.model.shape, second.model.dtype))
    rounds = beside.max_sessions * (2 * beside.widest_round + PAGE_SIZE)
    return _open(first, tokens), _open(second, beside.kv_tokens or tokens + rounds)


def _load(settings: ModelSettings, eight_bit: EightBit = "none") -> _Loaded:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = default_device() if settings.device == "auto" else settings.device
    dtype = resolve_dtype(settings.dtype, device, settings.model)
    _check_settings(settings, dtype, device)
    begin_compiling(device)
    loaded = load_model(settings.model, dtype, device, load_format=settings.load_format)
    tokenizer = load_tokenizer(settings.model)
    if settings.load_format != "dummy":  # which is measured in the shape of its config
        loaded = loaded.with_vocabulary(count_token_ids(tokenizer))
    proposes = isinstance(settings, DraftSettings)
    decoder, drafting = decoders_of(loaded.decoder, eight_bit, proposes, on_gpu=device != "cpu")
    if device != "cpu":
        torch.cuda.empty_cache()  # what making the weights has left over is room for KV
    return _Loaded(settings, replace(loaded, decoder=decoder), tokenizer, drafting, device)


def decoders_of(
    decoder: Decoder | ModulesDecoder, eight_bit: EightBit, proposes: bool, on_gpu: bool
) -> tuple[Decoder | ModulesDecoder, Decoder | None]:
    """Return what a model runs in, and what it drafts for itself and screens in, if it does that in 8 bits.

    proposes: whether it is a draft. What is only proposed need not be the same each time: on a GPU its sums are added
    in any order, which takes less time.
    """
    drafting = None if eight_bit == "none" else with_eight_bit_weights(decoder)
    if eight_bit == "all" and drafting is not None:
        decoder, drafting = drafting, None
    if on_gpu and drafting is not None:
        drafting = with_sums_in_any_order(drafting)
    if on_gpu and proposes and isinstance(decoder, Decoder):
        decoder = with_sums_in_any_order(decoder)
    return decoder, drafting


def _open(loaded: _Loaded, tokens: int) -> OpenedModel:
    """Return a loaded model with KV for so many tokens on its device. Raises ValueError if that is too little."""
    settings, shape = loaded.settings, loaded.model.shape
    backing, context = backing_store_tokens(settings, shape, loaded.model.dtype), context_of(settings, shape)
    if settings.host_kv_memory and backing < max(context, tokens):
        raise ValueError(
            f"{settings.model}: KV for {backing} tokens fits on the host, the backing store of all of it; a context "
            f"has {context}, the device has room for {tokens}: raise host_kv_memory, or lower max_context, kv_tokens "
            "or kv_memory"
        )
    runner = make_runner(
        loaded.model,
        tokens,
        backing,
        context,
        settings.dense_layers,
        enforce_eager=settings.enforce_eager,
        step_queries=settings.most_drafted + 1,
        most_queries=settings.widest_round,
        deterministic=settings.deterministic,
        attention_backend=None if settings.attention_backend == "auto" else settings.attention_backend,
        drafting=loaded.drafting,
    )
    ends = stop_token_ids(load_generation_config(settings.model), loaded.tokenizer)
    grammars = Grammars(loaded.tokenizer, runner.vocab_size, ends)
    return OpenedModel(runner, shape, tokenizer_hash(loaded.tokenizer), grammars)


def _check_settings(settings: ModelSettings, dtype: torch.dtype, device: str) -> None:
    """Raise ValueError or NotImplementedError for what can be refused before gigabytes are read."""
    if settings.deterministic and device == "cpu":
        raise NotImplementedError("deterministic is built for the GPU engine: leave it out, or use a CUDA device")
    check_attention_backend(settings.attention_backend, device, settings.deterministic, settings.enforce_eager)
    config = load_config(settings.model)
    feature = unbuilt_feature(config, on_gpu=device != "cpu")
    if feature is not None and device != "cpu" and not settings.enforce_eager:
        raise NotImplementedError(
            f"{settings.model}: no CUDA graphs are built for {feature}; pass --enforce-eager to run it through "
            "transformers' own modules"
        )
    check_memory(settings, read_shape(config), count_parameters(config), dtype, device)
