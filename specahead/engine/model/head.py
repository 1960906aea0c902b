"""A head that drafts on the hidden states of its target: EAGLE-3 (arXiv 2503.01840), one decoder layer.

The target leaves a state for each of its tokens: `fc` of its residual stream before three of its layers. The head reads
the state at a position together with the token after it, and draws the token after that. Behind tokens that it has
drafted itself, its own residual stream stands in for the states. The forward is that of `llama_eagle3.py` in SGLang and
in vLLM.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.model.decoder import Attend, Decoder, Observe, PassTokens
from specahead.kernels.backends import default_backend
from specahead.kernels.compiling import compiles_only
from specahead.kernels.linear import LinearWeight, Residual, linear
from specahead.kernels.rms_norm import add_rms_norm

# A logit of probability 0 at any temperature; finite, so that a grammar may leave no other.
_NEVER = -1e4


@dataclass(frozen=True)
class StateTap:
    """Takes the states of a target's tokens from its passes."""

    layers: tuple[int, ...]
    """The layers of the target whose input is read, in rising order."""
    fc: Tensor
    """[hidden of the head, layers * hidden of the target]."""
    states: Tensor
    """[places + 1, hidden of the head], the state of the token at each place of the target's pages. The last row, which
    is also that of place -1, takes the states of rows without a place."""

    def observer(self, slots: Tensor, room: Tensor | None = None) -> Observe:
        """Return what a pass is to be observed by (`Decoder.run`): it writes the states of the pass's tokens.

        slots: [tokens] int64, page * page_size + offset, -1 where a token is not written. room: [tokens, inputs of fc],
        where the streams are collected; None: new memory. Launches only.
        """
        inputs = len(self.layers), self.fc.shape[1] // len(self.layers)
        seen = self.states.new_empty(len(slots), *inputs) if room is None else room.view(-1, *inputs)
        last = 0 if compiles_only() else self.layers[-1]  # a pass that only compiles runs layer 0 instead

        def observe(layer: int, stream: Tensor) -> None:
            if layer in self.layers:
                seen[:, self.layers.index(layer)] = stream
            if layer == last:
                self.states[slots] = linear(seen.flatten(1), LinearWeight(self.fc), default_backend(slots.device))

        return observe

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the states of single tokens to other places: [tokens] int64 each, target -1 for a token that stays."""
        self.states[target] = self.states[source]


@dataclass
class CarriedStates:
    """The states that the next pass of a round reads."""

    values: Tensor
    """[rows, hidden]."""


@dataclass(frozen=True, kw_only=True)
class DraftHead(Decoder):
    """The head's weights. Its only layer reads embeddings and states, normed by themselves, side by side."""

    hidden_norm: Tensor
    """[hidden], of the states; the layer's input_norm is that of the embeddings."""
    own_ids: Tensor
    """[logits of lm_head] int64, the target's id of each of the head's tokens."""
    vocab_size: int
    """Token ids of the target."""
    states: Tensor
    """Those of StateTap."""
    carried: CarriedStates | None = None
    """None: `reading` has not said yet what the next pass reads."""

    def reading(self, slots: Tensor) -> "DraftHead":
        """Return the head with the states at places of the target's pages for its next pass, a row each.

        Each pass leaves the states that its rows with logits carry to the next pass. slots: [rows] int64, -1 for a row
        of no token.
        """
        return replace(self, carried=CarriedStates(self.states[slots]))

    def run(
        self,
        tokens: PassTokens,
        kv: KVCache,
        attend: Attend,
        logits_rows: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Run the tokens that follow the states, as `Decoder.run` does, at the positions of the states.

        Returns logits over the target's ids, _NEVER for ids that the head cannot draft.
        """
        if self.carried is None:
            raise RuntimeError("a head reads states: say which by `reading`")
        kernels, states, (layer,) = default_backend(tokens.ids.device), self.carried.values, self.layers
        assert layer.input_norm is not None
        embedded, _ = add_rms_norm(
            F.embedding(tokens.ids, self.embedding), None, layer.input_norm, self.epsilon, kernels
        )
        normed, _ = add_rms_norm(states, None, self.hidden_norm, self.epsilon, kernels)
        qkv = linear(torch.cat([embedded, normed], 1), layer.qkv, kernels, in_parts=True)
        queries = self._rotate(0, qkv, tokens, kv, kernels)
        attended, stream = attend(0, queries).flatten(1), Residual(states)
        if logits_rows is not None:
            if not len(logits_rows):
                return states.new_empty(0, self.vocab_size)
            attended, stream = attended[logits_rows], stream.rows(logits_rows)
        logits, stream = self._read(
            self.after_attention(0, stream, attended, kernels), self.norm, self.lm_head, kernels
        )
        self.carried.values = stream.total
        return logits.new_full((len(logits), self.vocab_size), _NEVER).index_copy_(1, self.own_ids, logits)
