"""Makes a runner of a loaded model and its KV."""

from typing import Any

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading.model import LoadedModel
from specahead.engine.steps.grouping import MAX_OVERHANG
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.kv_scales import KVScales


def make_runner(
    loaded: LoadedModel,
    kv_tokens: int,
    backing_tokens: int = 0,
    max_context: int = 0,
    kv_scales: KVScales | None = None,
    **how: Any,
) -> ModelRunner:
    """Return a runner of a loaded model.

    kv_tokens: tokens whose KV fits on the device.
    backing_tokens: tokens whose KV fits in the backing store in host memory; 0: there is no such store.
    max_context: the most tokens of a sequence; 0: kv_tokens.
    kv_scales: those of all layers, for KV in 8 bits; None: the KV has the model's dtype.
    how: the settings of ModelRunner.
    """
    max_context = max_context or kv_tokens
    kv = _make_kv(loaded, kv_tokens, backing_tokens, max_context + MAX_OVERHANG, kv_scales)
    of_model = loaded.decoder, kv, loaded.shape.vocab_size
    return ModelRunner(*of_model, max_context, weight_bytes=loaded.decoder.weight_bytes, **how)


def _make_kv(
    loaded: LoadedModel, kv_tokens: int, backing_tokens: int, longest: int, scales: KVScales | None
) -> KVCache:
    """Return empty KV of the model's sizes, dtype and device. longest: the most tokens of a sequence."""
    ranks, of_weights = loaded.decoder.ranks, (loaded.dtype, loaded.device)
    shape = loaded.shape.of_rank(ranks.count)
    of_model = shape.num_layers, shape.num_kv_heads, shape.head_dim
    pages, chooses = pages_for(kv_tokens), loaded.decoder.block_rule is not None
    if not backing_tokens:
        return KVCache(*of_model, pages, *of_weights, ranks=ranks, scales=scales, page_means=chooses)
    backing = backing_tokens // PAGE_SIZE
    return TieredKV(*of_model, min(pages, backing), backing, longest, *of_weights, ranks, scales, chooses)
