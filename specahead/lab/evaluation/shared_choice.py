"""`specahead evaluate sharing`: what it changes that tokens read the blocks which the first one among them chooses.

MatX's table of cross-entropies by the number of drafted tokens ("Speculative Decoding with Blockwise Sparse Attention",
2025), in small: each text is read once for each number. A model that does not choose blocks by itself is made to, by
its own queries and without training, as in that article's ablation c.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import pages_for
from specahead.engine.loading.model import LoadedModel, default_device, load_model, resolve_dtype
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.layer_attention import ChosenPart, ChosenReads, LayerAttention, Rows
from specahead.engine.sampling.divergence import divergence
from specahead.engine.steps.reads import CHOOSING_AT_ONCE, heads_of
from specahead.kernels.backends import default_backend
from specahead.kernels.chosen_blocks import BlockRule, plan_choice
from specahead.lab.evaluation.cases import perplexity_cases, read_texts
from specahead.lab.evaluation.report import align


@dataclass(frozen=True)
class SharingRow:
    """How a model does if so many tokens share a choice."""

    shared: int
    """Tokens that share a choice of blocks; 1: each chooses for itself; 0: everything is read."""
    nats: float
    """Cross-entropy of a token, in nats."""
    variation: float
    """Mean total variation from the distributions of tokens that choose each for itself."""
    same: float
    """Share of tokens whose likeliest next token is the same as there."""


def run(flags: argparse.Namespace) -> None:
    """Measure, and print a table.

    Raises ValueError for numbers that do not fit, NotImplementedError for a model that the fused decoder does not run.
    """
    odd = [count for count in flags.shared if count < 0 or (count and CHOOSING_AT_ONCE % count)]
    if odd:
        raise ValueError(f"--shared {odd[0]}: give 0, or a divisor of {CHOOSING_AT_ONCE}")
    device = default_device()
    dtype = resolve_dtype(flags.dtype, device, flags.model)
    loaded, tokenizer = load_model(flags.model, dtype, device), load_tokenizer(flags.model)
    if not isinstance(loaded.decoder, Decoder):
        raise NotImplementedError(f"{flags.model}: choosing blocks is built for the fused decoder")
    rule = loaded.decoder.block_rule or BlockRule(
        flags.block_size, flags.top, flags.first, flags.local, flags.dense_below
    )
    if flags.context < rule.dense_below + 2:
        raise ValueError(f"--context {flags.context}: everything is read below {rule.dense_below} tokens; give more")
    cases = perplexity_cases(read_texts(flags.text), tokenizer, flags.context, 0, flags.passages)
    print(f"{rule}, {len(cases)} passages of {flags.context} tokens, from {rule.dense_below} on")
    print(to_text(measure(loaded, rule, [case.tokens for case in cases], flags.shared)))


@torch.inference_mode()
def measure(loaded: LoadedModel, rule: BlockRule, texts: list[list[int]], shared: Sequence[int]) -> list[SharingRow]:
    """Return a row for each number of tokens that share a choice, over the tokens that choose.

    shared: these numbers, each dividing CHOOSING_AT_ONCE; 0: everything is read.
    """
    sums = torch.zeros(len(shared), 3, dtype=torch.float64)
    for text in tqdm(texts, desc="reading texts", leave=False, disable=None):
        tokens = torch.tensor(text, device=loaded.device)
        scored, own = slice(rule.dense_below, len(text) - 1), logits_of(loaded, rule, tokens, 1)
        for index, count in enumerate(shared):
            logits = own if count == 1 else logits_of(loaded, rule, tokens, count)
            nats = torch.nn.functional.cross_entropy(logits[scored], tokens[rule.dense_below + 1 :])
            apart = divergence(logits[scored], own[scored])[:, [0, 2]].mean(0)
            sums[index] += torch.cat((nats[None], apart)).double().cpu() / len(texts)
    return [SharingRow(count, *numbers) for count, numbers in zip(shared, sums.tolist(), strict=True)]


def logits_of(loaded: LoadedModel, rule: BlockRule, tokens: Tensor, shared: int) -> Tensor:
    """Return the logits of a text [tokens, vocab] float32. shared: tokens that share a choice; 0: it reads everything.

    tokens: [tokens] int64 on the model's device.
    """
    decoder, shape, length = loaded.decoder, loaded.shape, len(tokens)
    sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim, pages_for(length)
    kv = KVCache(*sizes, loaded.dtype, loaded.device, page_means=True)
    assert kv.page_means is not None
    at, table = torch.arange(length, device=loaded.device), torch.arange(sizes[3], device=loaded.device).int()[None]
    ends = torch.tensor([0, length], dtype=torch.int32, device=loaded.device)
    attend = LayerAttention(
        heads_of(decoder, kv), Rows(ends, ends[1:], table, length), kv.layer_pages, default_backend(loaded.device)
    )
    attend.chosen = ChosenReads(kv.page_means, at, _parts(rule, shape.num_kv_heads, table, at, shared))
    return decoder.run(tokens, at, at, kv.k_pages, kv.v_pages, attend).float()


def _parts(rule: BlockRule, kv_heads: int, table: Tensor, positions: Tensor, shared: int) -> list[ChosenPart]:
    """Return the parts of a text in which so many tokens after one another share a choice; none for 0."""
    parts = []
    for first in range(0, len(positions) if shared else 0, CHOOSING_AT_ONCE):
        here = positions[first : first + CHOOSING_AT_ONCE]
        starts, last = here[::shared], here[-1:] + 1
        stops = torch.cat((starts[1:], last)).int()
        rows = Rows(torch.cat((starts, last)).int() - first, stops, table.expand(len(starts), -1).contiguous(), shared)
        choice = plan_choice(rule, starts.int() + 1, stops, kv_heads, shared)
        parts.append(ChosenPart(slice(first, first + len(here)), rows, starts - first, choice))
    return parts


def to_text(rows: list[SharingRow]) -> str:
    """Return the rows as a table."""
    names = {0: "none, all is read", 1: "each token"}
    head = ["choice of", "cross-entropy", "total variation", "same likeliest"]
    cells = [
        [
            names.get(row.shared, f"the first of {row.shared}"),
            f"{row.nats:.4f}",
            f"{row.variation:.4f}",
            f"{row.same:.4f}",
        ]
        for row in rows
    ]
    return align([head, *cells], left=1)
