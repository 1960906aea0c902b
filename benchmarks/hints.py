"""`specahead bench codec --hints`: how much of what a round newly selects its hints name beforehand, by their bytes.

Passages are read and stretched to the shape of an 8B target at 100K context as benchmarks/selection_trace.py says; kept
are the scores by which `ahead` chooses, of each round's first query and of all four. A round selects a share of all
blocks over all rows, what it selected last counting `stickiness` times. Hints are made by the draft's own functions
(draft_service/hints.py): the last round's runners-up, then what the first query alone would select. Rounds go on from
the text's own tokens, so all are accepted.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import models
from benchmarks.selection_trace import (
    GAMMA,
    PROMPT,
    ROUNDS,
    SEGMENTS,
    blend_matrix,
    evenly_spread,
    groups_of,
    open_draft,
    query_weights,
    stretch,
)
from benchmarks.stack import _processor as processor
from draft_service.hints import FIRST_QUERY, LIKELY, Hint, make_hint
from engine.draft_rounds import Ranked, ranked_blocks
from engine.loading import load_tokenizer
from evaluation.report import align
from kernels.shared_top_k import rank_over_all
from sparsity.choice import choose_over_all
from sparsity.plan import load_plan
from sparsity.selection import BlockSelection
from wire.selection_codec import decode_selection

BYTES = (1024, 2048, 4096, 8192, 16384)
SHARES = (1 / 10, 1 / 32)
KNOWN = (1, 4)
OLDEST = 4  # selections whose blocks a hot buffer is taken to have


@dataclass(frozen=True)
class Scores:
    """Of one round, float32 [rows, blocks]: by its first query, and by all of them."""

    first: Tensor
    all: Tensor


@dataclass
class Row:
    """Means over rounds, of hints that name nothing of the last `known` selections.

    fresh: blocks that a round selects and none of the last four did: what a target is likely to lack. likely, first:
    blocks that the two hints name. found_…: share of the fresh ones that they name. wasted_…: share of what they name
    that is not selected. make_ms, decode_ms: of one hint.
    """

    share: float
    known: int
    bytes: int
    fresh: float
    likely: float
    first: float
    found_likely: float
    found_first: float
    wasted_likely: float
    wasted_first: float
    make_ms: float
    decode_ms: float


def run_hint_benchmark(files: list[str], json_file: str | None) -> list[Row]:
    """Measure over texts, print the table, write it to `json_file` if given. Raises ValueError if they are short."""
    rounds = read_scores(files)
    stickiness = load_plan(models.PLAN).stickiness
    rows = [
        row
        for share in SHARES
        for known in KNOWN
        for row in measure(choose_rounds(rounds, share, stickiness), share, known, BYTES)
    ]
    head = {
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} after",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "specahead bench codec --hints " + " ".join(Path(name).name for name in files),
    }
    print(report(head, rows))
    if json_file:
        content = head | {"rows": [asdict(row) for row in rows]}
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n")
    return rows


def read_scores(files: list[str]) -> list[Scores]:
    """Of each round, stretched. Read by the bundled draft, on a CPU."""
    runner, tokenizer, plan = open_draft(), load_tokenizer(str(models.DRAFT)), load_plan(models.PLAN)
    texts = [tokenizer.encode(Path(name).read_text(encoding="utf-8")) for name in files]
    blend = blend_matrix(plan)
    count = groups_of(len(blend)) * SEGMENTS
    recorded = []  # of each passage and round [2, heads, BLOCKS]
    passages = evenly_spread(texts, count, PROMPT + GAMMA * ROUNDS)
    for tokens in tqdm(passages, total=count, desc="reading", unit="passage"):
        weights = query_weights(runner, tokens)
        recorded.append([torch.stack([blend @ w[0], blend @ w.mean(0)]) for w in weights])
    by_round = [torch.stack(of_round).numpy() for of_round in zip(*recorded, strict=True)]
    return [Scores(*(torch.from_numpy(stretch(r[:, i])) for i in range(2))) for r in by_round]


@dataclass(frozen=True)
class Choice:
    """Of one round: what it selects, what its first query alone would, and how much each block counts for both."""

    selected: Tensor  # bool [rows, blocks]
    would: Tensor  # bool [rows, blocks]
    by_first: Tensor  # float32 [rows, blocks]
    by_all: Tensor  # float32 [rows, blocks]


def choose_rounds(rounds: list[Scores], share: float, stickiness: float) -> list[Choice]:
    """share: of all blocks that a round selects."""
    count = round(share * rounds[0].all.numel())
    before = torch.zeros_like(rounds[0].all, dtype=torch.bool)
    choices = []
    for scores in rounds:
        favour = 1 + (stickiness - 1) * before
        by_first, by_all = scores.first * favour, scores.all * favour
        before = choose_over_all(by_all, count)
        choices.append(Choice(before, choose_over_all(by_first, count), by_first, by_all))
    return choices


def measure(choices: list[Choice], share: float, known: int, sizes: Sequence[int]) -> list[Row]:
    """known: of the last selections, that hints leave out. sizes: bytes of a hint."""
    of_size: dict[int, list[dict[str, float]]] = {most: [] for most in sizes}
    for i in range(OLDEST, len(choices)):
        now, last = choices[i], choices[i - 1]
        held = _any(choices[i - known : i])
        lacking = now.selected & ~_any(choices[i - OLDEST : i])
        ranked = {
            LIKELY: _ranked(last.by_all * ~held, max(sizes)),
            FIRST_QUERY: _ranked(now.by_first * (now.would & ~held), 2 * max(sizes)),
        }
        selection = BlockSelection.from_matrix(held.numpy())
        for most, results in of_size.items():
            results.append(_count(ranked, selection, now.selected, lacking, most))
    return [
        Row(share, known, most, **{name: float(np.mean([r[name] for r in results])) for name in results[0]})
        for most, results in of_size.items()
    ]


def _any(choices: Sequence[Choice]) -> Tensor:
    return torch.stack([choice.selected for choice in choices]).any(0)


def _ranked(scores: Tensor, most: int) -> Ranked:
    return ranked_blocks(rank_over_all(scores[None], most)[0].numpy(), scores.shape[1])


def _count(
    ranked: dict[int, Ranked], held: BlockSelection, selected: Tensor, lacking: Tensor, most: int
) -> dict[str, float]:
    """What Row has, of one round."""
    heads, columns = lacking.shape
    said: list[Hint] = []
    out = {"fresh": float(lacking.sum()), "make_ms": 0.0, "decode_ms": 0.0}
    for part, name in ((LIKELY, "likely"), (FIRST_QUERY, "first")):
        started = time.perf_counter()
        places = most if part == LIKELY else 2 * most
        hint = make_hint(part, ranked[part][:places], held, said, heads, columns, most)
        made = time.perf_counter()
        blocks = np.empty((0, 2), np.int32)
        if hint is not None:
            said.append(hint)
            decode_selection(hint.data, {}, heads, columns)
            blocks = hint.blocks
        out["make_ms"] += 1e3 * (made - started) / 2
        out["decode_ms"] += 1e3 * (time.perf_counter() - made) / 2
        row, block = torch.from_numpy(blocks.astype(np.int64)).T
        out[name] = float(len(blocks))
        out[f"found_{name}"] = float(lacking[row, block].sum() / lacking.sum())
        out[f"wasted_{name}"] = 1 - float(selected[row, block].sum()) / max(1, len(blocks))
    return out


COLUMNS = ("selected", "leaving out", "bytes", "fresh", "named", "of the fresh", "wasted", "make", "decode")


def report(head: dict[str, str], rows: list[Row]) -> str:
    cells = [
        [
            f"{row.share:.1%}",
            f"last {row.known}",
            str(row.bytes),
            f"{row.fresh:.0f}",
            f"{row.likely:.0f} + {row.first:.0f}",
            f"{row.found_likely:.1%} + {row.found_first:.1%}",
            f"{row.wasted_likely:.0%}, {row.wasted_first:.0%}",
            f"{row.make_ms:.2f} ms",
            f"{row.decode_ms:.2f} ms",
        ]
        for row in rows
    ]
    lines = [f"{name}: {value}" for name, value in head.items()]
    return "\n".join([*lines, "", align([list(COLUMNS), *cells], left=0)])
