"""`specahead evaluate sharing`: what it changes that tokens read the blocks which the first one among them chooses.

MatX's table of cross-entropies by the number of drafted tokens ("Speculative Decoding with Blockwise Sparse Attention",
2025), in small: each text is read once for each number. Models that were trained to share a choice are those of
specahead.models.train_native_sparse. A model that does not choose blocks by itself is made to, by its own queries and
without training, as in that article's ablation c.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.loading.model import LoadedModel, default_device, load_model, resolve_dtype
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.layer_attention import ChosenPart, ChosenReads, LayerAttention, Rows
from specahead.engine.sampling.divergence import divergence
from specahead.engine.steps.reads import CHOOSING_AT_ONCE, heads_of
from specahead.kernels.backends import default_backend
from specahead.kernels.chosen_blocks import BlockRule, plan_choice
from specahead.lab.evaluation import verification_intensity
from specahead.lab.evaluation.cases import perplexity_cases, read_texts
from specahead.lab.evaluation.report import align
from specahead.models.native_sparse import is_native_sparse, load_native_sparse


@dataclass(frozen=True)
class Reader:
    """A model that reads texts whose tokens share choices of blocks."""

    name: str
    logits: Callable[[Tensor, int], Tensor]
    """Of a text [tokens] int64 and how many tokens share a choice (0: it reads everything): [tokens, vocab] float32."""
    start: int
    """Tokens before this one read everything before them in any case."""
    about: str
    """How it chooses."""
    tokenizer: Any
    """Of transformers."""


@dataclass(frozen=True)
class SharingRow:
    """How a model does if so many tokens share a choice."""

    model: str
    shared: int
    """Tokens that share a choice of blocks; 1: each chooses for itself; 0: everything is read."""
    nats: float
    """Cross-entropy of a token, in nats."""
    more: float
    """Nats above those of the first model where each token chooses for itself."""
    error: float | None
    """Standard error of `more`, over passages in pairs; None if there is one passage."""
    variation: float
    """Mean total variation from the distributions of the same model's tokens that choose each for itself."""
    same: float
    """Share of tokens whose likeliest next token is the same as there."""


def run(flags: argparse.Namespace) -> None:
    """Measure, and print a table.

    Raises ValueError for numbers that do not fit and for models of different tokenizers, NotImplementedError for models
    that the fused decoder does not run.
    """
    if flags.intensity:
        verification_intensity.run(flags)
        return
    odd = [count for count in flags.shared if count < 0 or (count and CHOOSING_AT_ONCE % count)]
    if odd:
        raise ValueError(f"--shared {odd[0]}: give 0, or a divisor of {CHOOSING_AT_ONCE}")
    readers = [open_reader(model, flags) for model in flags.model]
    texts, tokens = read_texts(flags.text), list[list[int]]()
    for reader in readers:
        if flags.context < reader.start + 2:
            raise ValueError(f"--context {flags.context}: everything is read below {reader.start} tokens; give more")
        cases = perplexity_cases(texts, reader.tokenizer, flags.context, 0, flags.passages)
        if tokens and tokens != [case.tokens for case in cases]:
            raise ValueError(f"--model {reader.name}: its tokenizer differs from that of {readers[0].name}")
        tokens = [case.tokens for case in cases]
    rows = measure(readers, tokens, flags.shared)
    if flags.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for reader in readers:
        print(f"{reader.name}: {reader.about}, everything is read below {reader.start} tokens")
    print(f"{len(tokens)} passages of {flags.context} tokens")
    print(to_text(rows))


def open_reader(model: str, flags: argparse.Namespace) -> Reader:
    """Return a model of the flags. Raises NotImplementedError for one that cannot be made to choose blocks."""
    device, name = default_device(), Path(model).name
    if is_native_sparse(model):
        sparse, tokenizer = load_native_sparse(model, device)
        read, reach = (lambda tokens, shared: sparse(tokens[None], shared)[0]), sparse.rule.reach
        return Reader(name, read, reach, f"{sparse.rule}", tokenizer)
    loaded = load_model(model, resolve_dtype(flags.dtype, device, model), device)
    if not isinstance(loaded.decoder, Decoder):
        raise NotImplementedError(f"{model}: choosing blocks is built for the fused decoder")
    asked = BlockRule(flags.block_size, flags.top, flags.first, flags.local, flags.dense_below)
    rule = loaded.decoder.block_rule or asked
    return Reader(name, partial(logits_of, loaded, rule), rule.dense_below, f"{rule}", load_tokenizer(model))


@torch.inference_mode()
def measure(readers: Sequence[Reader], texts: Sequence[list[int]], shared: Sequence[int]) -> list[SharingRow]:
    """Return a row for each model and number of tokens that share a choice, over the tokens that choose.

    shared: these numbers, each dividing CHOOSING_AT_ONCE; 0: everything is read.
    """
    start, device = max(reader.start for reader in readers), default_device()
    figures = torch.zeros(len(readers), len(shared), len(texts), 3, dtype=torch.float64)
    first_own = torch.zeros(len(texts), dtype=torch.float64)
    for at, text in enumerate(tqdm(texts, desc="reading texts", leave=False, disable=None)):
        tokens = torch.tensor(text, device=device)
        scored, following = slice(start, len(text) - 1), tokens[start + 1 :]
        for index, reader in enumerate(readers):
            own = reader.logits(tokens, 1)[scored]
            if index == 0:
                first_own[at] = torch.nn.functional.cross_entropy(own, following)
            for column, count in enumerate(shared):
                logits = own if count == 1 else reader.logits(tokens, count)[scored]
                nats = torch.nn.functional.cross_entropy(logits, following)
                apart = divergence(logits, own)[:, [0, 2]].mean(0)
                figures[index, column, at] = torch.cat((nats[None], apart)).double().cpu()
    more = figures[..., 0] - first_own
    rows = []
    for i, reader in enumerate(readers):
        for j, count in enumerate(shared):
            nats, variation, same = figures[i, j].mean(0).tolist()
            error = more[i, j].std().item() / len(texts) ** 0.5 if len(texts) > 1 else None
            rows.append(SharingRow(reader.name, count, nats, more[i, j].mean().item(), error, variation, same))
    return rows


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
    parts = _parts(rule, shape.num_kv_heads, table, at, shared)
    attend.chosen = ChosenReads(kv.k_pages, kv.page_means, at, at // PAGE_SIZE, parts)
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
        parts.append(ChosenPart(slice(first, first + len(here)), rows, rows.tables, starts - first, choice))
    return parts


def to_text(rows: list[SharingRow]) -> str:
    """Return the rows as a table."""
    names = {0: "none, all is read", 1: "each token"}
    head = ["model", "choice of", "cross-entropy", "more", "± standard error", "total variation", "same likeliest"]
    cells = [
        [
            *(row.model, names.get(row.shared, f"the first of {row.shared}"), f"{row.nats:.4f}", f"{row.more:+.4f}"),
            *("" if row.error is None else f"{row.error:.4f}", f"{row.variation:.4f}", f"{row.same:.4f}"),
        ]
        for row in rows
    ]
    return align([head, *cells], left=2)
