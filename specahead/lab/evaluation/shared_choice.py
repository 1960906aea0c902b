"""`specahead evaluate sharing`: what is lost if several tokens in a row read the blocks that the first one chooses.

It repeats MatX's table of cross-entropies by the number of drafted tokens ("Speculative Decoding with Blockwise Sparse
Attention", 2025) with small models; each text is read once for each number. specahead.models.train_native_sparse makes
models that are trained to share a choice. A model that does not choose blocks by itself is made to choose by its own
queries, without training, as in ablation c of the article. Churn says how many blocks of a choice the last ones lack,
which a target with KV in host memory has to fetch once its layers have chosen.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from specahead.engine.model.decoder import Decoder, PassTokens
from specahead.engine.model.layer_attention import ChosenPart, ChosenReads, Rows
from specahead.engine.sampling.divergence import divergence
from specahead.engine.steps.reads import CHOOSING_AT_ONCE, PagedModel
from specahead.kernels.backends import default_backend
from specahead.kernels.chosen_blocks import BlockRule, plan_choice
from specahead.kernels.paged_attention import BlockLists
from specahead.lab.evaluation import verification_intensity
from specahead.lab.evaluation.cases import perplexity_cases, read_texts
from specahead.lab.evaluation.rounds import HOT_ROUNDS, hot_blocks
from specahead.lab.results import Columns, text_table, to_json
from specahead.models.native_sparse import NativeSparseLlama, is_native_sparse, load_native_sparse

RULE = BlockRule(64, 8, 1, 2, 1024)  # of models that have none: 8 blocks of 64 tokens, where there are more than 1,024


@dataclass(frozen=True)
class ReadText:
    """A text as a model has read it."""

    logits: Tensor
    """[tokens, vocab] float32."""
    chosen: Tensor | None
    """[choices, layers * kv_heads * blocks] bool, what is read by the tokens that share a choice; None: everything."""

    def churn(self, first: int) -> list[float]:
        """Return the shares of blocks that the choice before, and the four before, lack, from choice `first` on.

        They are NaN if all is read or if there are fewer than two choices.
        """
        if self.chosen is None:
            return [torch.nan, torch.nan]
        chosen = self.chosen[first:]
        masks = zip(HOT_ROUNDS, hot_blocks(chosen), strict=True)
        return [((chosen[1:] & ~hot).sum() / chosen[1:].sum()).item() for last, hot in masks if last in (1, 4)]


@dataclass(frozen=True)
class Reader:
    """A model that reads texts whose tokens share choices of blocks."""

    name: str
    read: Callable[[Tensor, int], ReadText]
    """Takes a text [tokens] int64 and the number of tokens that share a choice (0: all is read)."""
    dense_below: int
    """The first tokens of a text, as many as this, read everything in any case."""
    rule: str
    """How the model chooses blocks, in words."""
    tokenizer: Any
    """The tokenizer, of transformers."""


@dataclass(frozen=True)
class SharingRow:
    """How a model predicts text if a number of tokens share a choice."""

    model: str
    shared: int
    """Tokens that share a choice of blocks; 1: each chooses for itself; 0: everything is read."""
    nats: float
    """Cross-entropy of a token, in nats."""
    increase: float
    """Nats above those of the first model, each of whose tokens chooses for itself."""
    standard_error: float | None
    """Standard error of `increase` over paired passages; None for a single passage."""
    variation: float
    """Mean total variation from the distributions of the same model when each token chooses for itself."""
    same: float
    """Share of tokens with the same likeliest next token as then."""
    churn: float | None
    """Share of the blocks of a choice that are not in the choice before it; None where all is read, or for one choice.
    """
    churn4: float | None
    """Share of them that are in none of the four choices before."""


def run(flags: argparse.Namespace) -> None:
    """Measure the models of the flags, and print a table or JSON.

    Raises ValueError for counts of --shared and for a --context that do not fit, and for models with different
    tokenizers; NotImplementedError for models that cannot be made to choose blocks.
    """
    if flags.intensity:
        verification_intensity.run(flags)
        return
    odd = [count for count in flags.shared if count < 0 or (count and CHOOSING_AT_ONCE % count)]
    if odd:
        raise ValueError(f"--shared {odd[0]}: expected 0 or a divisor of {CHOOSING_AT_ONCE}")
    readers = [open_reader(model) for model in flags.model]
    texts, tokens = read_texts(flags.text), list[list[int]]()
    for reader in readers:
        if flags.context < reader.dense_below + 2:
            least, of = reader.dense_below + 2, f"{reader.name} reads everything below {reader.dense_below} tokens"
            raise ValueError(f"--context {flags.context}: {of}; give a context of at least {least}")
        cases = perplexity_cases(texts, reader.tokenizer, flags.context, 0, flags.passages)
        if tokens and tokens != [case.tokens for case in cases]:
            raise ValueError(f"--model {reader.name}: expected the same tokenizer as that of {readers[0].name}")
        tokens = [case.tokens for case in cases]
    rows = measure(readers, tokens, flags.shared)
    if flags.json:
        print(to_json(rows))
        return
    for reader in readers:
        print(f"{reader.name}: {reader.rule}; everything is read below {reader.dense_below} tokens")
    print(f"{len(tokens)} passages of {flags.context} tokens")
    print(text_table(COLUMNS, rows))


def open_reader(model: str) -> Reader:
    """Load a model, and have it choose blocks by its own rule, or by RULE.

    Raises NotImplementedError for a model that cannot be made to choose blocks.
    """
    device, name = default_device(), Path(model).name
    if is_native_sparse(model):
        sparse, tokenizer = load_native_sparse(model, device)
        of_rule = sparse.rule.dense_below, str(sparse.rule)
        return Reader(name, partial(_read_native, sparse), *of_rule, tokenizer)
    loaded = load_model(model, resolve_dtype("auto", device, model), device)
    if not isinstance(loaded.decoder, Decoder):
        raise NotImplementedError(
            f"{model}: only models that the fused decoder runs can be made to choose blocks; give one that needs no "
            "--enforce-eager"
        )
    rule = loaded.decoder.block_rule or RULE
    return Reader(name, partial(read_choosing, loaded, rule), rule.dense_below, str(rule), load_tokenizer(model))


@torch.inference_mode()
def measure(readers: Sequence[Reader], texts: Sequence[list[int]], shared: Sequence[int]) -> list[SharingRow]:
    """Return a row for each model and each number of tokens that share a choice.

    texts: token ids, each text longer than any `dense_below`. Only tokens from there on are scored.
    shared: the numbers, each 0 (all is read) or a divisor of CHOOSING_AT_ONCE.
    """
    start, device = max(reader.dense_below for reader in readers), default_device()
    figures = torch.zeros(len(readers), len(shared), len(texts), 5, dtype=torch.float64)
    first_own = torch.zeros(len(texts), dtype=torch.float64)
    for at, text in enumerate(tqdm(texts, desc="reading texts", leave=False, disable=None)):
        tokens = torch.tensor(text, device=device)
        scored, following = slice(start, len(text) - 1), tokens[start + 1 :]
        for index, reader in enumerate(readers):
            by_itself = reader.read(tokens, 1)
            own = by_itself.logits[scored]
            if index == 0:
                first_own[at] = torch.nn.functional.cross_entropy(own, following)
            for column, count in enumerate(shared):
                reading = by_itself if count == 1 else reader.read(tokens, count)
                logits = reading.logits[scored]
                nats = torch.nn.functional.cross_entropy(logits, following)
                apart = divergence(logits, own)[:, [0, 2]].mean(0)
                churn = reading.churn(-(-start // count) if count else 0)
                figures[index, column, at] = torch.tensor([nats, *apart, *churn], dtype=torch.float64)
    increase = figures[..., 0] - first_own
    rows = []
    for i, reader in enumerate(readers):
        for j, count in enumerate(shared):
            nats, variation, same, *churn = figures[i, j].mean(0).tolist()
            above = increase[i, j]
            error = above.std().item() / len(texts) ** 0.5 if len(texts) > 1 else None
            last, last4 = (None if math.isnan(share) else share for share in churn)
            rows.append(SharingRow(reader.name, count, nats, above.mean().item(), error, variation, same, last, last4))
    return rows


def _read_native(model: NativeSparseLlama, tokens: Tensor, shared: int) -> ReadText:
    """Read a text by a model with native sparse attention (`Reader.read`)."""
    (logits,) = model(tokens[None], shared)
    return ReadText(logits, torch.cat(model.selected(), 1)[0].transpose(0, 1).flatten(1) if shared else None)


def read_choosing(loaded: LoadedModel, rule: BlockRule, tokens: Tensor, shared: int) -> ReadText:
    """Read a text [tokens] int64 by a model whose attention chooses blocks by a rule (`Reader.read`)."""
    decoder, shape, length = loaded.decoder, loaded.shape, len(tokens)
    sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim, pages_for(length)
    kv = KVCache(*sizes, loaded.dtype, loaded.device, page_means=True)
    assert kv.page_means is not None
    at, table = torch.arange(length, device=loaded.device), torch.arange(sizes[3], device=loaded.device).int()[None]
    ends = torch.tensor([0, length], dtype=torch.int32, device=loaded.device)
    model = PagedModel(decoder, kv, default_backend(loaded.device))
    attend = model.attends(Rows(ends, ends[1:], table, length))
    parts = _parts(rule, shape.num_kv_heads, table, at, shared)
    chosen: list[list[Tensor]] = [[] for _ in range(shape.num_layers)]

    def note(layer: int, blocks: BlockLists) -> BlockLists:
        chosen[layer].append(blocks.as_mask(-(-length // rule.block_size)))
        return blocks

    attend.chosen = ChosenReads(kv.k_pages, kv.page_means, at, at // PAGE_SIZE, parts, fetch=note)
    logits = model.run(PassTokens(tokens, at, at), attend).float()
    return ReadText(logits, torch.cat([torch.cat(of_layer).flatten(1) for of_layer in chosen], 1) if shared else None)


def _parts(rule: BlockRule, kv_heads: int, table: Tensor, positions: Tensor, shared: int) -> list[ChosenPart]:
    """Cut a text into parts in which `shared` tokens in a row share a choice. For 0 there are none: all is read."""
    parts = []
    for first in range(0, len(positions) if shared else 0, CHOOSING_AT_ONCE):
        here = positions[first : first + CHOOSING_AT_ONCE]
        starts, last = here[::shared], here[-1:] + 1
        stops = torch.cat((starts[1:], last)).int()
        rows = Rows(torch.cat((starts, last)).int() - first, stops, table.expand(len(starts), -1).contiguous(), shared)
        choice = plan_choice(rule, starts.int() + 1, stops, kv_heads, shared)
        parts.append(ChosenPart(slice(first, first + len(here)), rows, rows.tables, starts - first, choice))
    return parts


_CHOICES = {0: "none, all is read", 1: "each token"}
COLUMNS: Columns[SharingRow] = {
    "model": lambda row: row.model,
    "choice of": lambda row: _CHOICES.get(row.shared, f"the first of {row.shared}"),
    "cross-entropy": lambda row: f"{row.nats:.4f}",
    "increase": lambda row: f"{row.increase:+.4f}",
    "± standard error": lambda row: "" if row.standard_error is None else f"{row.standard_error:.4f}",
    "total variation": lambda row: f"{row.variation:.4f}",
    "same likeliest": lambda row: f"{row.same:.4f}",
    "churn 1": lambda row: "" if row.churn is None else f"{row.churn:.1%}",
    "churn 4": lambda row: "" if row.churn4 is None else f"{row.churn4:.1%}",
}
