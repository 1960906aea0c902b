"""Recorded selections of the bundled draft, put together to the shape of an 8B target at 100K context.

Recording. Passages of held-out books, evenly spread, are read by the draft: 4,076 tokens, then rounds of four. A
round's scores are its four queries' mean block weights (blocks of 16), over 250 blocks: those that lie between the
sink block and the window of four when the first round is chosen. A tenth is chosen, in each of these ways:

    ahead         the plan's blends of draft heads for each target head (40), 1,000 blocks for all heads together
    ahead sticky  the same, but what was chosen in the last round is weighed 1 + STICKINESS times
    draft heads   each of the 16 draft heads' 25 heaviest blocks

Stretching. A row of 6,250 blocks is 25 passages side by side; rows that belong to the same heads' passages are a
group, so 40 (or 16) rows agree with each other as far as one model's heads do on one text. 256 rows are six
groups and 16 evenly spread heads of a seventh (or 16 groups). No passage is used twice in a trace, and nothing
is added: churn, runs along the context and agreement in a group are those of the recording. What is not there:
agreement beyond a group, decay of attention beyond 4,096 tokens, and the block that a context gains every fourth
round. Passages overlap where the texts are too short for so many.
"""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.attending import forward_weighing
from specahead.lab.evaluation.choice import choose_over_all
from specahead.lab.evaluation.models import load_runner, model_hash
from specahead.sparsity.plan import Plan, load_plan
from specahead.sparsity.selection import BlockSelection

BUNDLED = Path(__file__).parent / "traces" / "bundled-pair.npz"
ROUNDS, GAMMA, PROMPT, CHUNK = 10, 4, 4076, 1024
BLOCK, FIRST, BLOCKS, SHARE = 16, 1, 250, 0.1
STICKINESS = 0.3
ROWS, SEGMENTS = 256, 25


@dataclass(frozen=True)
class Trace:
    """The selections of ROUNDS rounds, made in one of the three ways."""

    name: str
    heads: int
    """Rows of a group."""
    churn: float
    """In the recording, share of a round's blocks that the last round did not have."""
    churn4: float
    """In the recording, share of a round's blocks that none of the last four rounds had."""
    weight_lost: float
    """Share of the heaviest blocks' weight that the choice misses."""
    history: np.ndarray
    """uint16 [ROWS, SEGMENTS * BLOCKS]; bit t is set if round t chose the block."""

    def selections(self) -> list[BlockSelection]:
        """Return the selection of each round, over all rows."""
        return [BlockSelection.from_matrix(chosen) for chosen in _rounds(self.history)]

    def passages(self, count: int) -> Iterator[list[BlockSelection]]:
        """Yield `count` passages as they were recorded, evenly spread: the selections of each one's rounds."""
        groups = ROWS // self.heads
        for i in range(count):
            group, segment = divmod(i * groups * SEGMENTS // count, SEGMENTS)
            rows = slice(group * self.heads, (group + 1) * self.heads)
            part = self.history[rows, segment * BLOCKS : (segment + 1) * BLOCKS]
            yield [BlockSelection.from_matrix(chosen) for chosen in _rounds(part)]


def churn_of(selections: list[BlockSelection], before: int) -> float:
    """Return the mean share of a round's blocks that none of the last `before` rounds had, from the fifth round on."""
    new = total = 0
    for i in range(4, len(selections)):
        known = selections[i - 1].words
        for other in selections[i - before : i - 1]:
            known = known | other.words
        new += int(np.bitwise_count(selections[i].words & ~known).sum())
        total += int(np.bitwise_count(selections[i].words).sum())
    return new / max(1, total)


def _rounds(history: np.ndarray) -> list[np.ndarray]:
    return [(history >> i & 1).astype(bool) for i in range(ROUNDS)]


def save_traces(traces: list[Trace], file: Path, about: dict[str, str]) -> None:
    """Write traces as .npz. about: how they were made."""
    arrays = {}
    for trace in traces:
        facts = {key: value for key, value in vars(trace).items() if key != "history"}
        arrays[f"{trace.name} facts"] = _text(json.dumps(facts))
        arrays[trace.name] = np.frombuffer(lzma.compress(trace.history.astype("<u2").tobytes(), preset=9), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, allow_pickle=False, about=_text(json.dumps(about)), **arrays)


def open_traces(file: Path) -> "np.lib.npyio.NpzFile":
    """Open a file of traces. Raises FileNotFoundError where the package was installed, since that leaves them out."""
    if not file.exists():
        message = f"{file} is not there: an installed specahead comes without recordings; run this from its sources"
        raise FileNotFoundError(message)
    return np.load(file, allow_pickle=False)


def load_traces(file: Path) -> tuple[list[Trace], dict[str, str]]:
    """Return the traces of a file, and how they were made. Raises FileNotFoundError."""
    with open_traces(file) as content:
        traces = []
        for name in content.files:
            if f"{name} facts" in content.files:
                plain = lzma.decompress(content[name].tobytes())
                history = np.frombuffer(plain, "<u2").reshape(ROWS, SEGMENTS * BLOCKS)
                traces.append(Trace(**json.loads(content[f"{name} facts"].tobytes()), history=history))
        return traces, json.loads(content["about"].tobytes())


def _text(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def record_traces(files: list[str], file: Path) -> None:
    """Record from texts, with the bundled pair and its plan. Raises ValueError if they are too short."""
    draft = str(models.DRAFT)
    runner = open_draft()
    tokenizer = load_tokenizer(draft)
    texts = [tokenizer.encode(Path(name).read_text(encoding="utf-8")) for name in files]
    plan = load_plan(models.PLAN)
    blend = blend_matrix(plan)
    draft_heads, target_heads = plan.draft_layers * plan.draft_heads, len(blend)
    most = groups_of(draft_heads) * SEGMENTS
    few = groups_of(target_heads) * SEGMENTS
    blended = {i * most // few for i in range(few)}
    by_head: list[list[Tensor]] = []
    ahead: dict[float, list[tuple[list[Tensor], float]]] = {0.0: [], STICKINESS: []}
    passages = evenly_spread(texts, most, PROMPT + GAMMA * ROUNDS)
    for i, tokens in enumerate(tqdm(passages, total=most, desc="recording", unit="passage")):
        weights = _weights(runner, tokens)
        by_head.append([_heaviest(w) for w in weights])
        if i in blended:
            for stickiness, chosen in ahead.items():
                chosen.append(_choose([blend @ w for w in weights], stickiness))
    traces = [
        _trace("draft heads", by_head, 0.0),
        *(
            _trace(
                "ahead sticky" if stickiness else "ahead",
                [rounds for rounds, _ in chosen],
                float(np.mean([lost for _, lost in chosen])),
            )
            for stickiness, chosen in ahead.items()
        ),
    ]
    save_traces(
        traces[1:] + traces[:1],
        file,
        {
            "recorded": datetime.now(UTC).date().isoformat(),
            "command": "specahead bench codec --record " + " ".join(Path(name).name for name in files),
            "draft": model_hash(draft),
            "plan": plan.hash,
        },
    )


def evenly_spread(texts: list[list[int]], count: int, length: int) -> Iterator[list[int]]:
    """Yield passages of equal length, whose starts are evenly spread over all places with room for one.

    Raises ValueError if no text is longer than a passage.
    """
    places = [max(0, len(text) - length) for text in texts]
    if not sum(places):
        raise ValueError(f"the texts are too short for a passage of {length} tokens")
    for i in range(count):
        start = sum(places) * i // count
        for text, room in zip(texts, places, strict=True):
            if start < room:
                yield text[start : start + length]
                break
            start -= room


def open_draft() -> ModelRunner:
    return load_runner(str(models.DRAFT), torch.float32, "cpu", PROMPT + GAMMA * ROUNDS + BLOCK)


def _weights(runner: ModelRunner, tokens: list[int]) -> list[Tensor]:
    """Of each round [draft heads, BLOCKS]."""
    return [weights.mean(0) for weights in query_weights(runner, tokens)]


def query_weights(runner: ModelRunner, tokens: list[int]) -> list[Tensor]:
    """Of each round [GAMMA queries, draft heads, BLOCKS]."""
    sequence, rounds = SequenceKV(), []
    try:
        for start in range(0, PROMPT, CHUNK):
            runner.forward([SequenceInput(sequence, tokens[start : min(PROMPT, start + CHUNK)])])
        for start in range(PROMPT, PROMPT + GAMMA * ROUNDS, GAMMA):
            _, given = forward_weighing(runner, sequence, tokens[start : start + GAMMA], BLOCK, GAMMA, False)
            weights = given.transpose(0, 1).flatten(1, 2)
            rounds.append(weights[..., FIRST : FIRST + BLOCKS])
    finally:
        runner.kv.release(sequence)
    return rounds


def blend_matrix(plan: Plan) -> Tensor:
    """[target heads, draft heads], each row times its head's importance: what `ahead` chooses by."""
    matrix = torch.zeros(len(plan.blends), plan.draft_layers * plan.draft_heads)
    for row, (blend, importance) in enumerate(
        zip(plan.blends, (value for layer in plan.head_importance for value in layer), strict=True)
    ):
        for layer, head, weight in blend:
            matrix[row, layer * plan.draft_heads + head] = weight * importance
    return matrix


def _choose(scores: list[Tensor], stickiness: float) -> tuple[list[Tensor], float]:
    """Of each round a tenth over all rows, and the mean share of the heaviest tenth's weight that is lost."""
    chosen: list[Tensor] = []
    lost = []
    for score in scores:
        count = round(SHARE * score.numel())
        favoured = score * (1 + stickiness * chosen[-1]) if chosen else score
        chosen.append(choose_over_all(favoured, count))
        lost.append(1 - float(score[chosen[-1]].sum() / score[choose_over_all(score, count)].sum()))
    return chosen, float(np.mean(lost[1:]))


def _heaviest(weights: Tensor) -> Tensor:
    """Of each row a tenth."""
    best = weights.topk(round(SHARE * weights.shape[1])).indices
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, best, True)


def _trace(name: str, chosen: list[list[Tensor]], weight_lost: float) -> Trace:
    """chosen: of each passage and round [heads, BLOCKS]"""
    recorded = [[BlockSelection.from_matrix(c.numpy()) for c in rounds] for rounds in chosen]
    history = np.stack(
        [sum((c.numpy().astype(np.uint16) << t for t, c in enumerate(rounds))) for rounds in chosen]  # type: ignore[misc]
    )
    return Trace(
        name=name,
        heads=history.shape[1],
        churn=float(np.mean([churn_of(rounds, 1) for rounds in recorded])),
        churn4=float(np.mean([churn_of(rounds, 4) for rounds in recorded])),
        weight_lost=weight_lost,
        history=stretch(history),
    )


def groups_of(heads: int) -> int:
    return -(-ROWS // heads)


def stretch(recorded: np.ndarray) -> np.ndarray:
    """[passages, heads, BLOCKS] to [ROWS, SEGMENTS * BLOCKS]; there are SEGMENTS passages for each group."""
    heads, groups = recorded.shape[1], groups_of(recorded.shape[1])
    rows = recorded.reshape(SEGMENTS, groups, heads, BLOCKS).transpose(1, 2, 0, 3).reshape(groups, heads, -1)
    left = ROWS - (groups - 1) * heads
    last = rows[-1, np.arange(left) * heads // left]
    return np.concatenate([rows[:-1].reshape(-1, rows.shape[2]), last])
