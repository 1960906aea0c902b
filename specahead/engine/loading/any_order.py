"""A decoder whose passes of few rows may add sums in any order, as a draft's may."""

from dataclasses import replace

from torch import Tensor

from specahead.engine.model.decoder import Decoder, DecoderLayer
from specahead.kernels.few_rows_linear import LEAST_DEPTH


def with_sums_in_any_order(decoder: Decoder) -> Decoder:
    """Return a decoder whose passes of few rows take less time, and differ in their last bits from run to run.

    What a draft proposes need not be the same each time. Where this is not built for a decoder's layers, it is returned
    as it is.
    """
    if not all(map(_is_built_for, decoder.layers)):
        return decoder
    layers = [replace(layer, wide_norms=_wide_norms(layer)) for layer in decoder.layers]
    return replace(decoder, layers=layers, in_any_order=True)


def _is_built_for(layer: DecoderLayer) -> bool:
    more = layer.out_bias, layer.attention_out_norm, layer.mlp_out_norm, layer.full_norms
    weights = layer.qkv, layer.out, layer.gate_up, layer.down
    return (
        None not in (layer.input_norm, layer.mlp_norm)
        and all(part is None for part in more)
        and all(weight.shape[1] % LEAST_DEPTH == 0 and weight.itemsize == 2 for weight in weights)
    )


def _wide_norms(layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
    """Return what layers in 16 bits multiply by as they read; in 8 bits the norm is a launch of its own."""
    if layer.eight_bit is not None:
        return None
    assert layer.input_norm is not None
    assert layer.mlp_norm is not None
    return layer.input_norm.float(), layer.mlp_norm.float()
