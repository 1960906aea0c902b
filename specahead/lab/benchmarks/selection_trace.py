"""Recorded announcements of the bundled draft, put together to the shape of an 8B target at 100K context.

Recording. Passages of held-out books, evenly spread, are read by the draft: 4,076 tokens, then rounds of four. A
round's scores are its four queries' mean block weights (blocks of 16), over 250 blocks: those that lie between the
sink block and the window of four when the first round is chosen. The plan blends the weights of draft heads for each
of the 40 target heads, what the last round chose is weighed `stickiness` times, and the heaviest tenth is chosen, 1,000
blocks of all heads together.

Stretching. A row of 6,250 blocks is 25 passages side by side; rows that belong to the same heads' passages are a
group, so 40 rows agree with each other as far as one model's heads do on one text. 256 rows are six groups and 16
evenly spread heads of a seventh. No passage is used twice, and nothing is added: churn, runs along the context and
agreement in a group are those of the recording. What is not there: agreement beyond a group, decay of attention beyond
4,096 tokens, and the block that a context gains every fourth round. Passages overlap where the texts are too short for
so many.
"""

import json
import lzma
from collections.abc import Iterator
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

ANNOUNCED = Path(__file__).parent / "traces" / "announced.npz"
ROUNDS, GAMMA, PROMPT, CHUNK = 10, 4, 4076, 1024
BLOCK, FIRST, BLOCKS, SHARE = 16, 1, 250, 0.1
ROWS, SEGMENTS = 256, 25


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


def save_trace(history: np.ndarray, file: Path, about: dict[str, str]) -> None:
    """Write a trace as .npz.

    history: uint16 [ROWS, SEGMENTS * BLOCKS]; bit t is set if round t chose the block. about: how it was made.
    """
    packed = np.frombuffer(lzma.compress(history.astype("<u2").tobytes(), preset=9), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, allow_pickle=False, about=np.frombuffer(json.dumps(about).encode(), np.uint8), history=packed)


def open_traces(file: Path) -> "np.lib.npyio.NpzFile":
    """Open a file of traces. Raises FileNotFoundError where the package was installed, since that leaves them out."""
    if not file.exists():
        message = f"{file} is not there: an installed specahead comes without recordings; run this from its sources"
        raise FileNotFoundError(message)
    return np.load(file, allow_pickle=False)


def load_trace(file: Path) -> tuple[list[BlockSelection], dict[str, str]]:
    """Return the selection of each round over all rows, and how the trace was made. Raises FileNotFoundError."""
    with open_traces(file) as content:
        plain = lzma.decompress(content["history"].tobytes())
        history = np.frombuffer(plain, "<u2").reshape(ROWS, SEGMENTS * BLOCKS)
        rounds = [BlockSelection.from_matrix((history >> i & 1).astype(bool)) for i in range(ROUNDS)]
        return rounds, json.loads(content["about"].tobytes())


def record_trace(files: list[str], file: Path) -> None:
    """Record from texts, with the bundled pair and its plan. Raises ValueError if they are too short."""
    draft = str(models.DRAFT)
    runner = load_runner(draft, torch.float32, "cpu", PROMPT + GAMMA * ROUNDS + BLOCK)
    tokenizer = load_tokenizer(draft)
    texts = [tokenizer.encode(Path(name).read_text(encoding="utf-8")) for name in files]
    plan = load_plan(models.PLAN)
    blend = blend_matrix(plan)
    count = groups_of(len(blend)) * SEGMENTS
    passages = evenly_spread(texts, count, PROMPT + GAMMA * ROUNDS)
    chosen = []
    for tokens in tqdm(passages, total=count, desc="recording", unit="passage"):
        chosen.append(_choose([blend @ weights for weights in _weights(runner, tokens)], plan.stickiness))
    about = {
        "recorded": datetime.now(UTC).date().isoformat(),
        "command": "specahead bench codec --record " + " ".join(Path(name).name for name in files),
        "draft": model_hash(draft),
        "plan": plan.hash,
    }
    history = np.stack([sum((each.astype(np.uint16) << t for t, each in enumerate(rounds))) for rounds in chosen])  # type: ignore[misc]
    save_trace(stretch(history), file, about)


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


def _weights(runner: ModelRunner, tokens: list[int]) -> list[Tensor]:
    """Return the mean weights of each round's queries on blocks, [draft heads, BLOCKS]."""
    sequence, rounds = SequenceKV(), []
    try:
        for start in range(0, PROMPT, CHUNK):
            runner.forward([SequenceInput(sequence, tokens[start : min(PROMPT, start + CHUNK)])])
        for start in range(PROMPT, PROMPT + GAMMA * ROUNDS, GAMMA):
            _, given = forward_weighing(runner, sequence, tokens[start : start + GAMMA], BLOCK, GAMMA, False)
            weights = given.transpose(0, 1).flatten(1, 2)
            rounds.append(weights[..., FIRST : FIRST + BLOCKS].mean(0))
    finally:
        runner.kv.release(sequence)
    return rounds


def blend_matrix(plan: Plan) -> Tensor:
    """Return what `ahead` chooses by: [target heads, draft heads], each row times its head's importance."""
    matrix = torch.zeros(len(plan.blends), plan.draft_layers * plan.draft_heads)
    for row, (blend, importance) in enumerate(
        zip(plan.blends, (value for layer in plan.head_importance for value in layer), strict=True)
    ):
        for layer, head, weight in blend:
            matrix[row, layer * plan.draft_heads + head] = weight * importance
    return matrix


def _choose(scores: list[Tensor], stickiness: float) -> list[np.ndarray]:
    """Return what each round chooses: a tenth over all rows, bool [target heads, BLOCKS]."""
    chosen: list[Tensor] = []
    for score in scores:
        favoured = torch.where(chosen[-1], stickiness * score, score) if chosen else score
        chosen.append(choose_over_all(favoured, round(SHARE * score.numel())))
    return [each.numpy() for each in chosen]


def groups_of(heads: int) -> int:
    return -(-ROWS // heads)


def stretch(recorded: np.ndarray) -> np.ndarray:
    """[passages, heads, BLOCKS] to [ROWS, SEGMENTS * BLOCKS]; there are SEGMENTS passages for each group."""
    heads, groups = recorded.shape[1], groups_of(recorded.shape[1])
    rows = recorded.reshape(SEGMENTS, groups, heads, BLOCKS).transpose(1, 2, 0, 3).reshape(groups, heads, -1)
    left = ROWS - (groups - 1) * heads
    last = rows[-1, np.arange(left) * heads // left]
    return np.concatenate([rows[:-1].reshape(-1, rows.shape[2]), last])
