"""A model run by transformers' own modules, without graphs: any architecture whose layers all use full attention.

Its attention is registered with transformers as `specahead` (engine.loading.model). The kernels enforce causality by
positions, so no mask is ever built.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from specahead.engine.kv.cache import KVCache
from specahead.engine.model.decoder import Attend, Decoder, Observe, PassTokens
from specahead.engine.parallel.ranks import ALONE
from specahead.kernels.kv_write import write_kv

NAME = "specahead"

# Keywords that change nothing here, since position ids are applied already, or that are honoured elsewhere.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions"}


@dataclass(frozen=True)
class _Pass:
    """What the attention of one pass needs beside its queries."""

    attend: Attend
    slots: Tensor
    kv: KVCache
    scale: float


@dataclass(frozen=True)
class ModulesDecoder:
    """A causal LM of transformers that was loaded with the `specahead` attention."""

    model: nn.Module
    num_layers: int
    heads: int
    kv_heads: int
    attention_scale: float
    vocab: int
    """Token ids that it has logits of."""
    can_capture = False
    ranks = ALONE
    block_rule = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def read_share(self, rows: int) -> float:
        """Return the share of these bytes that a pass reads: mixtures of experts are taken for dense models."""
        return 1.0

    def run(
        self,
        tokens: PassTokens,
        kv: KVCache,
        attend: Attend,
        logits_rows: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Run one pass, as `specahead.engine.model.decoder.Decoder.run` does.

        Raises NotImplementedError if there is something to observe the layers.
        """
        if observe is not None:
            raise NotImplementedError("the layers of a transformers module can't be observed: a head needs a Decoder")
        if logits_rows is not None and not len(logits_rows):
            logits_rows = logits_rows.new_zeros(1)  # transformers takes no empty selection
        result = self.model(
            input_ids=tokens.ids[None],
            position_ids=tokens.positions[None],
            use_cache=False,
            logits_to_keep=0 if logits_rows is None else logits_rows,
            running=_Pass(attend, tokens.slots, kv, self.attention_scale),
        )
        logits: Tensor = result.logits[0, :, : self.vocab]
        return logits

    def with_eight_bit_weights(self) -> Decoder:
        """Raise NotImplementedError: transformers' modules have no such weights."""
        raise NotImplementedError("8-bit weights are built for the fused decoder: leave --enforce-eager out")

    def with_vocabulary(self, count: int) -> "ModulesDecoder":
        """Return the decoder with the logits of the ids below `count` only; the module's head is cut in place."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        for name in ("weight", "bias"):
            values = getattr(head, name, None)
            if values is not None:
                setattr(head, name, nn.Parameter(values.data[:count], requires_grad=False))
        head.out_features = count
        return replace(self, vocab=count)


def attend_in_pass(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    running: _Pass | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers' modules call.

    query [1, heads, tokens, dim]; key, value [1, kv_heads, tokens, dim] -> [1, tokens, heads, dim], None.
    Raises NotImplementedError for masks, dropout, another scale and keywords that are not built.
    """
    if running is None:
        raise RuntimeError("the 'specahead' attention runs within a pass; call the model through a runner")
    unsupported = [k for k, v in keywords.items() if v is not None and v is not False and k not in _HARMLESS]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if scale != running.scale:
        unsupported.append(f"scores scaled by {scale} instead of {running.scale}")
    if unsupported or attention_mask is not None or dropout:
        raise NotImplementedError(
            f"{type(module).__name__} asks attention for {unsupported or 'a mask or dropout'}, which is not built"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    kept = running.slots >= 0
    k_pages, v_pages = running.kv.layer_pages(layer)
    write_kv(k_pages, v_pages, running.slots[kept], keys[kept], values[kept], running.kv.scales_of(layer))
    return running.attend(layer, queries.contiguous())[None], None
