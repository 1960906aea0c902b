"""A draft and a target model that learn together: their shapes, their losses, what they are measured by.

Knows neither where the text comes from nor how the training is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

MAX_POSITIONS = 32768
DRAFT_TEXT_WEIGHT = 0.3  # of the draft's own cross-entropy
DRAFT_DISTILL_WEIGHT = 0.7  # of its divergence from the target


@dataclass(frozen=True)
class Shape:
    """The sizes of one Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From "hidden,layers,heads,kv_heads,intermediate[,head_dim]"."""
        return cls(*(int(part) for part in text.split(",")))


def llama(shape: Shape, vocab: int, end_of_text: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            rms_norm_eps=1e-5,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


@dataclass(frozen=True)
class Losses:
    """Means over a batch's tokens, each a scalar float32 tensor."""

    target: torch.Tensor  # cross-entropy, nats
    draft: torch.Tensor  # cross-entropy, nats
    divergence: torch.Tensor  # KL(target ‖ draft), nats; no gradient reaches the target
    agreement: torch.Tensor  # share of tokens where both models' most likely token is the same

    @property
    def total(self) -> torch.Tensor:
        return self.target + DRAFT_TEXT_WEIGHT * self.draft + DRAFT_DISTILL_WEIGHT * self.divergence

    def figures(self) -> tuple[float, float, float, float]:
        return self.target.item(), self.draft.item(), self.divergence.item(), self.agreement.item()


class Pair(torch.nn.Module):
    """Both models, in float32; on a GPU they compute in bfloat16."""

    def __init__(self, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
        super().__init__()
        self.target, self.draft = target, draft

    def logits(self, model: LlamaForCausalLM, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows * seq, vocab] for token ids x, int64 [rows, seq]."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            z = model(x).logits
        return z.float().flatten(0, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The fields of Losses for token ids x and the ids y that follow them, int64 [rows, seq]."""
        zt, zd, y = self.logits(self.target, x), self.logits(self.draft, x), y.flatten()
        divergence = F.kl_div(
            F.log_softmax(zd, -1), F.log_softmax(zt.detach(), -1), log_target=True, reduction="batchmean"
        )
        agreement = (zt.argmax(-1) == zd.argmax(-1)).float().mean()
        return F.cross_entropy(zt, y), F.cross_entropy(zd, y), divergence, agreement


@torch.no_grad()
def induction(pair: Pair, vocab: int) -> tuple[float, float]:
    """Each model's loss on the second copy of random tokens said twice: near 0 once it can look back."""
    generator = torch.Generator().manual_seed(1)
    lowest = min(300, vocab // 2)  # bytes and special tokens come first in a vocabulary
    once = torch.randint(lowest, vocab, (8, 256), generator=generator)
    twice = torch.cat([once, once], 1).to(pair.target.device)

    def loss(model: LlamaForCausalLM) -> float:
        z = pair.logits(model, twice).unflatten(0, (8, 512))
        return F.cross_entropy(z[:, 256:-1].flatten(0, 1), twice[:, 257:].flatten()).item()

    return loss(pair.target), loss(pair.draft)


@torch.no_grad()
def evaluate(pair: Pair, rows: Sequence[torch.Tensor]) -> Losses:
    """Means over rows of token ids, int64 [seq + 1] each."""
    pair.eval()
    inputs = (row.to(pair.target.device)[None] for row in rows)
    each = [torch.stack(pair(ids[:, :-1], ids[:, 1:])) for ids in inputs]
    pair.train()
    return Losses(*torch.stack(each).mean(0))
