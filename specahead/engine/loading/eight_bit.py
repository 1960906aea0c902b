"""A decoder's weights once more in 8 bits, for passes of few rows, whose time is that of reading weights."""

from dataclasses import replace

import torch

from specahead.engine.model.decoder import Decoder, EightBitLayer
from specahead.engine.model.modules import ModulesDecoder
from specahead.kernels.few_rows_linear import LEAST_DEPTH, quantize


def with_eight_bit_weights(decoder: Decoder | ModulesDecoder) -> Decoder:
    """Return a decoder that also holds its weights in 8 bits.

    Raises NotImplementedError for a model whose layers are more than passes over 8-bit weights are built for.
    """
    if isinstance(decoder, ModulesDecoder):
        raise NotImplementedError("8-bit weights are built for the fused decoder: leave --enforce-eager out")
    for layer in decoder.layers:
        if None in (layer.input_norm, layer.mlp_norm) or any(
            part is not None
            for part in (layer.out_bias, layer.full_norms, layer.attention_out_norm, layer.mlp_out_norm)
        ):
            raise NotImplementedError("8-bit weights are built for layers that norm what attention and MLP read, alone")
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down) if decoder.lm_head.is_cuda else ():
            if weight.shape[1] % LEAST_DEPTH or weight.dtype == torch.float32:
                raise NotImplementedError(
                    f"8-bit weights are built for 16-bit layers of a multiple of {LEAST_DEPTH} inputs, got "
                    f"{weight.shape[1]} of {weight.dtype}"
                )
    held = [EightBitLayer(*map(quantize, (each.qkv, each.out, each.gate_up, each.down))) for each in decoder.layers]
    layers = [replace(layer, eight_bit=weights) for layer, weights in zip(decoder.layers, held, strict=True)]
    return replace(decoder, layers=layers, eight_bit_head=quantize(decoder.lm_head))
