"""Opens the model of a service as its settings say: loaded, checked against the device, with room for its KV."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from specahead.config import ModelSettings
from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.loading.config import ModelShape, load_config, read_shape
from specahead.engine.loading.head import load_head, with_states
from specahead.engine.loading.kv_scales import check_eight_bit_kv, measure_kv_scales
from specahead.engine.loading.memory import (
    backing_store_tokens,
    bytes_of_token,
    bytes_of_weights,
    check_memory,
    context_of,
    room_for_kv,
)
from specahead.engine.loading.model import LoadedModel, check_ranks, default_device, load_model, resolve_dtype
from specahead.engine.loading.runner import make_runner
from specahead.engine.loading.tokenizer import (
    count_token_ids,
    load_generation_config,
    load_tokenizer,
    stop_token_ids,
    tokenizer_hash,
)
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.families import head_dim, unbuilt_feature
from specahead.engine.model.head import StateTap
from specahead.engine.model.quantization import check_storage, storage_of
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.engine.sampling.grammars import Grammars
from specahead.engine.steps.runner import TargetOrDraftRunner
from specahead.kernels.compiling import begin_compiling
from specahead.kernels.kv_scales import KVScales
from specahead.kernels.paged_attention import takes_heads

# Which passes of up to 64 rows read 8-bit weights: none, all, or only the passes whose tokens a later pass judges
# (self-drafting and screening).
EightBit = Literal["none", "all", "drafting"]


@dataclass(frozen=True)
class OpenedModel:
    """A model that is ready to serve."""

    runner: TargetOrDraftRunner
    shape: ModelShape
    tokenizer_hash: str
    grammars: Grammars
    """Compiles the grammars of sessions for the model's tokenizer."""


@dataclass(frozen=True)
class _Loaded:
    """A model on its device, without KV yet."""

    settings: ModelSettings
    model: LoadedModel
    tokenizer: Any
    drafting: Decoder | None
    """The decoder of passes whose tokens a later pass judges; None: the model's decoder."""
    kv_scales: KVScales | None
    """Of KV in 8 bits (engine.loading.kv_scales); None: the KV has the model's dtype."""
    device: str

    def room(self, beside: int = 0) -> int:
        """Return how many tokens of KV to allocate on each rank, as `room_for_kv` does; all weights must be loaded."""
        if self.device != "cpu":
            torch.cuda.empty_cache()  # memory that only loading needed becomes room for KV
        ranks = self.model.decoder.ranks
        shape = self.model.shape.of_rank(ranks.count)
        return room_for_kv(self.settings, shape, self.model.dtype, self.device, beside, ranks)


def open_model(
    settings: ModelSettings, eight_bit: EightBit = "none", ranks: Ranks = ALONE, meet: Callable[[], None] = lambda: None
) -> OpenedModel:
    """Load a model as the settings say, with logits of its tokenizer's ids only, and allocate its KV.

    eight_bit: which passes read 8-bit weights. ranks: that run the model together; this one's part is opened, with KV
    for as many tokens as on all others. meet: called once the part is loaded; returns when all ranks have joined.
    Raises ValueError or NotImplementedError for settings that do not fit each other, the model or the device, and
    what transformers raises for a model that it cannot load.
    """
    loaded = _load(settings, eight_bit, ranks, meet)
    return _open(loaded, loaded.room())


def open_both(
    settings: ModelSettings,
    beside: ModelSettings,
    eight_bit: EightBit,
    of_second: EightBit,
    ranks: Ranks = ALONE,
    meet: Callable[[], None] = lambda: None,
) -> tuple[OpenedModel, OpenedModel]:
    """Load two models on one device. The second has KV for as many tokens as the first, and for its own rounds.

    eight_bit, of_second: as for `open_model`, which says what this raises; one for each model. ranks, meet: the same,
    of the first; this process has the second whole.
    """
    second = _load(beside, of_second)
    first = _load(settings, eight_bit, ranks, meet)
    tokens = first.room(bytes_of_token(second.model.shape, second.model.dtype, beside.kv_cache_dtype))
    rounds = beside.max_sessions * (2 * beside.widest_round + PAGE_SIZE)
    return _open(first, tokens), _open(second, beside.kv_tokens or tokens + rounds)


def open_with_head(
    settings: ModelSettings, head: ModelSettings, eight_bit: EightBit, ranks: Ranks, meet: Callable[[], None]
) -> tuple[OpenedModel, OpenedModel]:
    """Load a model, and a head that drafts on its hidden states, on one device.

    The head has KV in the model's dtype for as many tokens as the model, and for its own rounds. The arguments are
    those of `open_model`. Raises what `open_model` and `load_head` raise.

    Rank 0 has the whole head and the other ranks have none of it: after each sum over ranks, rank 0 has the whole
    hidden states that a head reads. A head that is split over two ranks would save less than a tenth of a round. By
    sizes, the head of Llama-3.3-70B drafts four tokens in 2.3 ms on an H200 (2.4 GB a pass at 4.15 TB/s), and half of
    it in 1.3 ms with its sums; the target's pass takes 8.8 ms or more over two. All ranks would also have to follow the
    head's prompts, rounds and grammars.
    """
    loaded = _load(settings, eight_bit, ranks, meet)
    drafting, tap = load_head(head.model, loaded.model, head.load_format)
    a_token = bytes_of_token(drafting.shape, drafting.dtype) + tap.states.shape[1] * tap.states.itemsize
    tokens = loaded.room(a_token)
    drafting, tap = with_states(drafting, tap, pages_for(tokens) * PAGE_SIZE)
    beside = replace(loaded, settings=head, model=drafting, drafting=None, kv_scales=None)
    rounds = head.max_sessions * (2 * head.widest_round + PAGE_SIZE)
    opened = _open(loaded, tokens, tap)
    return opened, replace(_open(beside, tokens + rounds), grammars=opened.grammars)


def _load(
    settings: ModelSettings, eight_bit: EightBit, ranks: Ranks = ALONE, meet: Callable[[], None] = lambda: None
) -> _Loaded:
    """Return a model on its device, without KV yet. The arguments are those of `open_model`."""
    if settings.threads:
        torch.set_num_threads(max(1, settings.threads // ranks.count))
    device = default_device() if settings.device == "auto" else settings.device
    dtype = resolve_dtype(settings.dtype, device, settings.model)
    _check_settings(settings, dtype, device)
    if ranks.rank == 0:  # other ranks find the kernels compiled
        begin_compiling(device)
    loaded = load_model(settings.model, dtype, device, settings.load_format, settings.quantization, ranks)
    tokenizer = load_tokenizer(settings.model)
    if settings.load_format != "dummy":  # a dummy is measured in the shape of its config
        loaded = loaded.with_vocabulary(count_token_ids(tokenizer))
    drafting = None if eight_bit == "none" else loaded.decoder.with_eight_bit_weights()
    meet()  # all ranks run the passes that measure the scales
    kv_scales = measure_kv_scales(loaded, tokenizer, settings.max_context) if settings.kv_cache_dtype == "fp8" else None
    if eight_bit == "all" and drafting is not None:
        loaded, drafting = replace(loaded, decoder=drafting), None
    return _Loaded(settings, loaded, tokenizer, drafting, kv_scales, device)


def _open(loaded: _Loaded, tokens: int, tap: StateTap | None = None) -> OpenedModel:
    """Return a loaded model with KV for `tokens` tokens on its device; raise ValueError if host KV is too small.

    tap: takes the states of its tokens.
    """
    settings, shape = loaded.settings, loaded.model.shape
    of_rank = shape.of_rank(settings.tensor_parallel_size)
    backing, context = backing_store_tokens(settings, of_rank, loaded.model.dtype), context_of(settings, shape)
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
        loaded.kv_scales,
        enforce_eager=settings.enforce_eager,
        step_queries=settings.most_drafted + 1,
        most_queries=settings.widest_round,
        deterministic=settings.deterministic,
        drafting=loaded.drafting,
        tap=tap,
    )
    ends = stop_token_ids(load_generation_config(settings.model), loaded.tokenizer)
    grammars = Grammars(loaded.tokenizer, runner.vocab_size, ends)
    return OpenedModel(runner, shape, tokenizer_hash(loaded.tokenizer), grammars)


def _check_settings(settings: ModelSettings, dtype: torch.dtype, device: str) -> None:
    """Raise ValueError or NotImplementedError for settings that can be refused before gigabytes are read."""
    if settings.deterministic and device == "cpu":
        raise NotImplementedError("deterministic is built for the GPU engine: leave it out, or use a CUDA device")
    config = load_config(settings.model)
    if settings.deterministic and not takes_heads(head_dim(config)):
        raise NotImplementedError(
            f"{settings.model}: deterministic is not built for heads of {head_dim(config)} dimensions: leave it out"
        )
    feature = unbuilt_feature(config, on_gpu=device != "cpu")
    if feature is not None and device != "cpu" and not settings.enforce_eager:
        raise NotImplementedError(
            f"{settings.model}: no CUDA graphs are built for {feature}; pass --enforce-eager to run it through "
            "transformers' own modules"
        )
    held, ranks = storage_of(config, settings.quantization), settings.tensor_parallel_size
    check_ranks(settings.model, config, device, ranks)
    shape = read_shape(config)
    if settings.kv_cache_dtype == "fp8":
        check_eight_bit_kv(settings.model, device)
    check_storage(config, held, dtype, device, ranks)
    weights = bytes_of_weights(config, dtype, held, ranks)
    check_memory(settings, shape.of_rank(ranks), weights, dtype, device)
