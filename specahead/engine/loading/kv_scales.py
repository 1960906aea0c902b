"""The scales and centers of KV in 8 bits, made once, before a model serves, from the keys and values of a text.

A scale of 1 for all heads would not do: some models' keys have biases of hundreds (Qwen2), beyond the largest number of
e4m3, and others' values lie below the smallest that it rounds well. Scales from the first request would make answers
depend on the order of requests. Nor does the text have to be like those that are served: e4m3 is a floating-point
format, so that within a range of 2^14 a number loses as much by any scale, and a scale has only to have the head's
numbers lie in it. They may grow to twice the largest ones seen here, at least (kernels.kv_scales.MARGIN).

Much of a key is the same in all tokens but for its rotation, and what turns slowly stays nearly the same over the
context. Without that part, the center, there is less to round: for the bundled target it halves what perplexity loses.
Centers are means over positions up to a quarter of the longest context, since most sessions are shorter than that; what
turns faster than once in those positions averages out.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.loading.model import LoadedModel
from specahead.engine.loading.runner import make_runner
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.quantization import LEAST_CAPABILITY
from specahead.engine.parallel.commands import NOBODY
from specahead.engine.steps.inputs import SequenceInput
from specahead.kernels.kv_scales import KVScales, scales_for
from specahead.models import DEMO_TEXT

log = logging.getLogger(__name__)

OF_TEXT = 1024  # tokens that are read of the bundled text
OF_VOCABULARY = 1024  # tokens, evenly spread over the vocabulary, that are read after it: of all scripts and kinds
OF_PASS = 512  # tokens of a pass: on a CPU one pass over all tokens takes 1.4 times as long
CENTERED = 1 / 4  # of the longest context: positions over which keys' centers are means


def measure_kv_scales(loaded: LoadedModel, tokenizer: Any, max_context: int = 0) -> KVScales:
    """Return scales and centers of all layers of a model, the same at each start on one device.

    If several ranks run the model, all of them must call this together. Each gets the scales of its own heads. These
    equal the scales of a single rank up to the rounding of sums over ranks.
    max_context: in tokens; 0: the longest of the model. Raises ValueError on all ranks if any key or value is not
    finite.
    """
    decoder = loaded.decoder
    if isinstance(decoder, Decoder):  # every rank runs the passes by itself, so rank 0 sends none
        ranks = replace(decoder.ranks, followers=NOBODY)
        loaded = replace(loaded, decoder=replace(decoder, ranks=ranks))
    vocabulary, longest = loaded.shape.vocab_size, loaded.shape.max_position_embeddings
    text = tokenizer.encode(DEMO_TEXT.read_text(encoding="utf-8"))[:OF_TEXT]
    tokens = [token for token in text if token < vocabulary]
    tokens += range(0, vocabulary, max(1, vocabulary // OF_VOCABULARY))
    tokens = tokens[: min(OF_TEXT + OF_VOCABULARY, longest)]
    runner, sequence = make_runner(loaded, len(tokens) + PAGE_SIZE, enforce_eager=True), SequenceKV()
    for start in range(0, len(tokens), OF_PASS):
        runner.forward([SequenceInput(sequence, tokens[start : start + OF_PASS])])
    positions = max(1, min(longest, int(CENTERED * (max_context or longest))))
    centers, largest = [], []
    for layer in range(runner.kv.num_layers):
        keys, values = _of_sequence(runner.kv, layer, sequence)
        centers.append(torch.stack([_center_of_keys(loaded, layer, keys, positions), values.mean(0)]))
        # A difference is at most the largest key and the largest center together, however the key is rotated.
        largest.append(torch.stack([each.abs().amax((0, 2)) for each in (keys, values)]) + centers[-1].abs().amax(2))
    seen = torch.stack(largest)
    if not runner.kv.ranks.least(int(seen.isfinite().all())):
        seen.fill_(torch.nan)  # so that all ranks refuse the model
    scales = scales_for(seen)
    log.info("KV in 8 bits: scales are made", extra={"least": float(scales.min()), "largest": float(scales.max())})
    return KVScales(scales, torch.stack(centers))


def _of_sequence(kv: KVCache, layer: int, sequence: SequenceKV) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a sequence in a layer, float32 [tokens, kv_heads, dim]."""
    pages = torch.from_numpy(kv.gpu_pages(sequence)).long().to(kv.device)
    keys, values = (part[pages].transpose(1, 2).flatten(0, 1)[: sequence.length] for part in kv.layer_pages(layer))
    return keys.float(), values.float()


def _center_of_keys(loaded: LoadedModel, layer: int, keys: Tensor, positions: int) -> Tensor:
    """Return what the mean of a layer's keys would be over the first `positions` positions: [kv_heads, dim].

    keys: [tokens, kv_heads, dim], the first ones of a text. Returns zeros where it is not known how keys rotate.
    """
    decoder = loaded.decoder
    if not isinstance(decoder, Decoder):
        return torch.zeros_like(keys[0])
    half = decoder.cosines.shape[1] if decoder.layers[layer].rotates else 0
    first, second, rest = keys.split([half, half, keys.shape[2] - 2 * half], 2)
    cosines, sines = (table[: len(keys), None, :half] for table in (decoder.cosines, decoder.sines))
    before = (first * cosines + second * sines).mean(0), (second * cosines - first * sines).mean(0)  # the rotation
    cosines, sines = (table[:positions, :half].mean(0) for table in (decoder.cosines, decoder.sines))
    rotated = before[0] * cosines - before[1] * sines, before[1] * cosines + before[0] * sines
    return torch.cat([*rotated, rest.mean(0)], 1)


def check_eight_bit_kv(model: str, device: str) -> None:
    """Raise NotImplementedError if a device has no kernels for KV in 8 bits."""
    if device == "cpu":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        given, least = (f"{major}.{minor}" for major, minor in (capability, LEAST_CAPABILITY))
        raise NotImplementedError(
            f"{model}: kv_cache_dtype fp8 is built for GPUs of compute capability {least} or more, this one has "
            f"{given}: leave it out"
        )
