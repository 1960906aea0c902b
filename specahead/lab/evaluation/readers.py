"""What a rival's rounds read: chosen layer by layer, while the pass runs.

`LayerReader` answers what `specahead.sparsity.reader.Reader` answers. Its passes run by `lab.evaluation.attending`.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specahead.engine.model.decoder import Attend
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.backends import default_backend
from specahead.kernels.kv_scales import KVScales
from specahead.kernels.paged_attention import Batch, BlockLists, paged_attention
from specahead.kernels.selection import compact
from specahead.lab.evaluation.just_in_time import JustInTime, SequenceKeys
from specahead.lab.evaluation.methods import Rival, rival_of
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader


@dataclass
class LayerReader:
    """What one sequence reads by a rival. Call `read` before a pass and `finish` after it, once a round."""

    rival: Rival
    plan: Plan
    chosen: Tensor | None = None
    """The blocks that the last round read, bool [layers, kv_heads, blocks] on the CPU."""
    summary_tokens: float = 0.0
    """Tokens of KV that each sparse head read beside its blocks."""
    _masks: dict[int, Tensor] = field(default_factory=dict)
    """What layers read in the pass that runs; the others read everything."""
    _length: int = 0

    def __post_init__(self) -> None:
        self._selector = JustInTime(self.plan, self.rival.choose)

    def read(self, base: int, length: int, evidence: Tensor) -> None:
        """Prepare a round that builds on `base` committed tokens and ends at `length`.

        evidence: the draft's mean weights in the round, [draft_layers, draft_heads, blocks or more].
        """
        self._masks, self._length = {}, length
        self.summary_tokens = self.rival.summaries(self.plan, base)
        self._selector.begin(base, evidence)

    def attend(self, runner: ModelRunner, item: SequenceInput) -> Attend:
        """Return how the layers of a pass with this input attend: each chooses first."""
        length, scale = item.kv.length + len(item.tokens), runner.decoder.attention_scale

        def attend(layer: int, queries: Tensor) -> Tensor:
            k_pages, v_pages = runner.kv.layer_pages(layer)
            table = torch.from_numpy(item.kv.table()).to(queries.device)
            keys = SequenceKeys(k_pages, table.long(), length, runner.kv.scales_of(layer))
            chosen = self._selector.choose(layer, queries, keys, scale)
            if chosen is not None:
                self._masks[layer] = chosen
            reads = table, length, scale, chosen, self.plan.block_size, keys.scales
            return attend_chosen(queries, k_pages, v_pages, *reads)

        return attend

    def finish(self) -> None:
        """Take note of what the pass read."""
        plan = self.plan
        sizes = plan.target_layers, plan.target_kv_heads, plan.num_blocks(self._length)
        self.chosen = torch.ones(sizes, dtype=torch.bool)
        for layer, mask in self._masks.items():
            self.chosen[layer] = mask.cpu()

    @property
    def tokens_read(self) -> tuple[float, int]:
        """Tokens of KV that the heads of the last round read, summaries included, and tokens that there are."""
        plan = self.plan
        assert self.chosen is not None
        summaries = self.summary_tokens * len(plan.sparse_layers) * plan.target_kv_heads
        return float(self.chosen.sum()) * plan.block_size + summaries, self.chosen.numel() * plan.block_size


def attend_chosen(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    chosen: Tensor | None,
    block_size: int,
    scales: KVScales | None = None,
) -> Tensor:
    """Let the queries of one sequence attend over chosen blocks: [rows, heads, dim] like `queries`.

    table: [pages] int32; length: tokens with KV, the queries' own included; chosen: bool [kv_heads, blocks], None for
    all. scales: the layer's, for pages in 8 bits.
    """
    rows, device = len(queries), queries.device
    lengths, starts = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([length], [0, rows]))
    batch = Batch(queries, k_pages, v_pages, table[None], lengths, starts, scale, rows, scales=scales)
    blocks = None
    if chosen is not None:
        lists, counts = compact(chosen)
        blocks = BlockLists(lists[None], counts[None], block_size)
    return paged_attention(batch, blocks, backend=default_backend(device))


def make_reader(method: str, plan: Plan) -> Reader | LayerReader:
    """Return what says what the rounds of a method read. Raises PlanError for an unknown name."""
    rival = rival_of(method)
    if rival is not None:
        return LayerReader(rival, plan)
    return Reader(replace(plan, budget=1.0)) if method == "dense" else Reader(plan, report_blocks=True)
