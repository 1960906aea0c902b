"""The reads of a pass's layers: everything, or lists made before the pass or in it."""

from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.fetch import FetchPlan
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.layer_attention import Heads, ListedReads, Rows, plan_reads
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.steps.shapes import PassShape
from specahead.kernels.backends import Backend
from specahead.kernels.paged_attention import BlockLists, GroupMeans, Tuning


def heads_of(decoder: Decoder | ModulesDecoder, kv: KVCache) -> Heads:
    """Return what attention needs to know of a model's heads."""
    group, dim = decoder.heads // kv.kv_heads, kv.k_pages[0].shape[3]
    return Heads(kv.kv_heads, group, dim, decoder.attention_scale, kv.scales)


def listed_layers(shape: PassShape, kv: KVCache) -> dict[int, int]:
    """Return the number of each layer that has lists, among these."""
    return {layer: i for i, layer in enumerate(shape.sparse_layers(kv.num_layers))}


def listed_reads(
    heads: Heads,
    rows: Rows,
    kv: KVCache,
    shape: PassShape,
    given: dict[str, Tensor],
    attention: Backend,
    fetched: FetchPlan | None = None,
    tuning: Tuning | None = None,
) -> ListedReads:
    """Return the reads by the lists and counts in `given`, with the means that stand in for other blocks."""
    means: list[GroupMeans] | None = None
    if shape.read.groups:
        assert kv.means is not None
        means = kv.means.over(given["group_tables"], given["group_counts"])
    lines, wait = (None, None) if fetched is None else (fetched.lines, fetched.wait)
    blocks = BlockLists(given["lists"], given["counts"], shape.read.block_size, lines)
    work = plan_reads(heads, rows, attention, tuning, blocks, means)
    return ListedReads(blocks, listed_layers(shape, kv), work, means, wait)
