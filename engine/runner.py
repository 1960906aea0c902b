"""Running a model over a batch of sequences. One call is one step; the caller decides what is in it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.batch import SequenceInput, SparseRead, build_batch
from engine.kv.cache import KVCache
from kernels.paged_attention import BlockLists

if TYPE_CHECKING:
    from engine.draft_rounds import RoundOutput, RoundRequest, RoundSettings


@dataclass
class SequenceOutput:
    """logits: [rows, vocab] float32 for the rows asked for, or None.

    block_weights: [layers, emitting, heads, blocks] float32 of the last queries, or None.
    read_weights: [layers, kv_heads, blocks] float32, what each block that was read got: the sum over a KV head's
    query heads of the mean over the queries; 0 for what was not read and in dense layers. None if not asked for.
    blocks_read: over all sparse layers and heads, where the runner shared out a budget.
    tokens_fetched: (layer, KV head, token) triples that came from the host, where KV lies in tiers.
    verdict: tokens accepted and the next token, where the input was drafted and the runner judges; then no logits.
    """

    logits: Tensor | None = None
    block_weights: Tensor | None = None
    read_weights: Tensor | None = None
    blocks_read: int | None = None
    tokens_fetched: int = 0
    verdict: tuple[int, int] | None = None


class Runner:
    """What the services need of a model. Tests and benchmarks may stand in another.

    shares_budgets: whether reads may leave a budget to be shared out in the pass (SharedBudget). drafts_rounds:
    whether whole rounds of a draft are drafted in one call. deterministic: whether what a sequence gives depends on
    nothing that runs beside it.
    """

    kv: KVCache
    vocab_size: int
    shares_budgets = False
    drafts_rounds = False
    deterministic = False

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Run all inputs in one pass, write their KV and advance their lengths. Outputs in input order."""
        raise NotImplementedError

    def warm_up(self, reads: list[SparseRead | None], sequences: int) -> None:
        """Make ready for steps that read so, of up to so many sequences. There may be nothing to do."""

    def keep_memories(self, sequences: int) -> None:
        """Have room to share out the budgets of so many sequences."""
        raise NotImplementedError(f"{type(self).__name__} shares no budgets out")

    def warm_up_rounds(self, sequences: int) -> None:
        """The same for rounds, once they are prepared."""

    def prepare_rounds(self, settings: "RoundSettings") -> None:
        """Say how rounds are drafted, before the first `draft_rounds`."""
        raise NotImplementedError(f"{type(self).__name__} drafts step by step")

    def draft_rounds(self, requests: "list[RoundRequest]") -> "list[RoundOutput]":
        """Draft a whole round of each; the lengths of their KV are left to the caller."""
        raise NotImplementedError(f"{type(self).__name__} drafts step by step")


class ModelRunner(Runner):
    """A transformers causal LM loaded with the `specahead` attention (engine.loading) over paged KV."""

    def __init__(self, model: nn.Module, kv: KVCache, vocab_size: int) -> None:
        self.model = model
        self.kv = kv
        self.vocab_size = vocab_size
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def forward(self, inputs: list[SequenceInput], begun: bool = False) -> list[SequenceOutput]:
        """begun: the inputs are of a pass that has begun at the KV already."""
        batch = build_batch(inputs, self.kv, self.device, begun)
        keep_none = len(batch.logits_rows) == 0
        result = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=torch.zeros(1, dtype=torch.long) if keep_none else batch.logits_rows,
            batch=batch,
        )
        for item in inputs:
            item.kv.length += len(item.tokens)
        outputs = [SequenceOutput() for _ in inputs]
        logits = result.logits[0].float()
        row = 0
        for i in batch.order:
            rows = {"none": 0, "last": 1, "all": len(inputs[i].tokens)}[inputs[i].logits]
            if rows:
                outputs[i].logits = logits[row : row + rows]
                row += rows
        place = 0
        for part in batch.parts:
            count = len(part.kv_lengths)
            for j in range(count):
                output, length = outputs[batch.order[place + j]], int(part.kv_lengths[j])
                blocks = -(-length // part.block_size) if part.block_size else 0
                if part.emitting:
                    output.block_weights = torch.stack([w[j, :, :, :blocks] for w in part.block_weights])
                if part.emit_read:
                    layers = [_spread(entry, j, blocks) for entry in part.read_weights]
                    output.read_weights = torch.stack(
                        [torch.zeros(self.kv.kv_heads, blocks) if w is None else w for w in layers]
                    )
            place += count
        return outputs


def _spread(entry: tuple[BlockLists, Tensor] | None, sequence: int, blocks: int) -> Tensor | None:
    """Weights of listed blocks, on the CPU, at their blocks' places: [kv_heads, blocks]"""
    if entry is None:
        return None
    lists, weights = entry[0].lists[sequence].cpu(), entry[1][sequence].cpu()
    listed = torch.arange(lists.shape[1]) < entry[0].counts[sequence].cpu()[:, None]
    out = torch.zeros(len(lists), blocks)
    return out.scatter_add_(1, lists.where(listed, 0).long(), weights.where(listed, 0))
