"""EAGLE-3 heads of random weights in the form of their checkpoints, and their forward in plain torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

OWN = 40  # tokens that a head drafts: the odd ones, from 1 on


def save_head(folder: Path, target: Any, own: int = OWN, embeds: bool = True, **config: Any) -> dict[str, Tensor]:
    """Save a head for a target with this config of transformers; return its weights. config: keys of its own."""
    folder.mkdir()
    hidden, heads, kv_heads, inner, dim = target.hidden_size, 4, 2, 48, 16
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32,  # fewer than the target's
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": own,
    } | config
    torch.manual_seed(7)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes) * sizes[-1] ** -0.5

    half = 4 * random(own // 2, hidden)
    chosen = 2 * torch.arange(own) + 1
    weights = {
        "midlayer.self_attn.q_proj.weight": random(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": random(inner, hidden),
        "midlayer.mlp.up_proj.weight": random(inner, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, inner),
        "fc.weight": random(hidden, 3 * hidden),
        "lm_head.weight": torch.cat([half, -half]),  # so that none is likely always
        "d2t": chosen - torch.arange(own),
        "t2d": torch.isin(torch.arange(target.vocab_size), chosen),
    }
    norms = "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"
    weights |= {f"{name}.weight": 1 + 0.1 * torch.randn(hidden) for name in norms}
    if embeds:
        weights["embed_tokens.weight"] = random(target.vocab_size, hidden)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    return weights


@dataclass
class PlainHead:
    """The forward of a head over a target of transformers, without a cache: each token is run anew."""

    weights: dict[str, Tensor]
    target: Any
    layers: tuple[int, ...]
    """The layers of the target whose inputs are read."""

    def states(self, text: list[int]) -> Tensor:
        """Return the states of a text's tokens, [tokens, hidden]."""
        with torch.inference_mode():
            run = self.target(torch.tensor([text]), output_hidden_states=True)
        return torch.cat([run.hidden_states[layer][0] for layer in self.layers], 1) @ self._weight("fc").T

    def logits(self, text: list[int], drawn: list[int], states: Tensor | None = None) -> Tensor:
        """Return the logits, [drawn, vocab], that each of the tokens drawn after a text was drawn from.

        states: those of the text, if they are known.
        """
        states = self.states(text) if states is None else states
        states, tokens, logits = states[: len(text) - 1], text[1:], []
        for token in drawn:
            stream = self._run(tokens, states)
            logits.append(self._logits(stream[-1]))
            tokens, states = [*tokens, token], torch.cat([states, stream[-1:]])
        return torch.stack(logits)

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"].to(self.target.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self._weight(name) * wide.to(x.dtype)

    def _run(self, tokens: list[int], states: Tensor) -> Tensor:
        """Return the stream of the last layer, [tokens, hidden]. states: at the positions before the tokens."""
        table = self.weights.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        embeds = self._norm(table.to(states.dtype)[torch.tensor(tokens)], "midlayer.input_layernorm")
        both = torch.cat([embeds, self._norm(states, "midlayer.hidden_norm")], 1)
        q, k, v = (
            (both @ self._weight(f"midlayer.self_attn.{name}_proj").T).view(len(both), -1, 16).transpose(0, 1)
            for name in "qkv"
        )
        q, k = _rotate(q), _rotate(k)
        k, v = (each.repeat_interleave(2, 0) for each in (k, v))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        out = attended.transpose(0, 1).flatten(1) @ self._weight("midlayer.self_attn.o_proj").T
        stream = states + out
        x = self._norm(stream, "midlayer.post_attention_layernorm")
        gate, up = (x @ self._weight(f"midlayer.mlp.{name}_proj").T for name in ("gate", "up"))
        return stream + (F.silu(gate) * up) @ self._weight("midlayer.mlp.down_proj").T

    def _logits(self, stream: Tensor) -> Tensor:
        own = self._norm(stream, "norm") @ self._weight("lm_head").T
        ids = self.weights["d2t"] + torch.arange(len(own))
        return torch.full((self.target.config.vocab_size,), -torch.inf).index_copy(0, ids, own.float())


def _rotate(x: Tensor) -> Tensor:
    """Return heads [heads, tokens, 16] rotated by their positions."""
    speeds = 1 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    angles = torch.arange(x.shape[1])[:, None] * speeds
    cosines, sines = (each.repeat(1, 2).to(x.dtype) for each in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., 8:], x[..., :8]], -1)
    return x * cosines + turned * sines
