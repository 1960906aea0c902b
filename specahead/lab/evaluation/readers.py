"""What a rival's rounds read: chosen layer by layer, while the pass runs.

Several rounds run in one pass: the KV of a token is written by its own round's reads, whatever runs beside it. Passes
run by `lab.evaluation.attending`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.model.decoder import Attend
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.backends import default_backend
from specahead.kernels.paged_attention import Batch, BlockLists, paged_attention
from specahead.kernels.selection import compact
from specahead.lab.evaluation.choice import Rounds
from specahead.lab.evaluation.just_in_time import JustInTime, SequenceKeys
from specahead.lab.evaluation.methods import Rival
from specahead.sparsity.plan import Plan


@dataclass(frozen=True)
class BlocksRead:
    """What the rounds of a pass read."""

    chosen: Tensor
    """bool [rounds, layers, kv_heads, blocks of the last one], on the device."""
    blocks: list[int]
    """How many blocks there were in each round."""
    summaries: list[float]
    """Tokens of KV that summaries are worth which all heads together read in each round."""


def all_blocks(plan: Plan, rounds: Rounds, device: torch.device) -> Tensor:
    """Return the blocks that there are in each round, as `BlocksRead.chosen` has them."""
    sizes = torch.tensor([plan.num_blocks(length) for length in rounds.lengths], device=device)
    there = torch.arange(plan.num_blocks(rounds.last), device=device) < sizes[:, None, None, None]
    return there.repeat(1, plan.target_layers, plan.target_kv_heads, 1)


class LayerReader:
    """What one sequence reads by a rival. Call `read` before a pass and `finish` after it."""

    def __init__(self, rival: Rival, plan: Plan) -> None:
        self._rival, self._plan, self._selector = rival, plan, JustInTime(plan, rival.choose)

    def read(self, rounds: Rounds, evidence: Tensor) -> None:
        """Prepare the pass of some rounds.

        evidence: the draft's mean weights in each round, [rounds, draft_layers, draft_heads, blocks or more].
        """
        self._rounds = rounds
        self._masks: dict[int, Tensor] = {}  # what layers read in the pass that runs; the others read everything
        self._selector.begin(rounds, evidence)

    def attend(self, runner: ModelRunner, item: SequenceInput) -> Attend:
        """Return how the layers of a pass with this input attend: each chooses first."""
        rounds, length, scale = self._rounds, item.kv.length + len(item.tokens), runner.decoder.attention_scale

        def attend(layer: int, queries: Tensor) -> Tensor:
            pages = runner.kv.layer_pages(layer)
            table = torch.from_numpy(item.kv.table()).to(queries.device)
            keys = SequenceKeys(pages[0], table.long(), length, runner.kv.scales_of(layer))
            chosen = self._selector.choose(layer, queries, keys, scale)
            lengths, rows, lists = [length], len(queries), None
            if chosen is not None:
                self._masks[layer] = chosen
                lengths, rows = list(rounds.lengths), rounds.rows
                entries, counts = (each.unflatten(0, (rounds.count, -1)) for each in compact(chosen.flatten(0, 1)))
                lists = BlockLists(entries, counts, self._plan.block_size)
            tables = table.expand(len(lengths), -1).contiguous()
            starts = range(0, len(queries) + 1, rows)
            ends, begins = (torch.tensor(each, dtype=torch.int32, device=queries.device) for each in (lengths, starts))
            batch = Batch(queries, *pages, tables, ends, begins, scale, rows, scales=keys.scales)
            return paged_attention(batch, lists, backend=default_backend(queries.device))

        return attend

    def finish(self) -> BlocksRead:
        """Return what the rounds of the pass read."""
        plan, rounds = self._plan, self._rounds
        device = next((mask.device for mask in self._masks.values()), torch.device("cpu"))
        chosen = all_blocks(plan, rounds, device)
        for layer, mask in self._masks.items():
            chosen[:, layer] &= mask
        heads = len(plan.sparse_layers) * plan.target_kv_heads
        blocks = [plan.num_blocks(length) for length in rounds.lengths]
        return BlocksRead(chosen, blocks, [self._rival.summaries(plan, base) * heads for base in rounds.bases])
