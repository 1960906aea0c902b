"""What sparse reading of prompts costs: prompts are read as the target service reads them, the rest densely."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.loading.model import default_device, resolve_dtype
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.steps.inputs import SequenceInput, SparsePrompt
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.prompt_attention import UNIT
from specahead.kernels.sparse_prompt_attention import BLOCK, blocks_read
from specahead.lab.evaluation.cases import Case, perplexity_cases, recall_cases
from specahead.lab.evaluation.models import load_runner
from specahead.lab.evaluation.report import align, markdown_table
from specahead.lab.evaluation.rounds import PREFILL_CHUNK, asked_of
from specahead.sparsity.plan import Plan
from specahead.sparsity.prompts import TAIL, sparse_tokens


@dataclass(frozen=True)
class PromptReading:
    """How a prompt is read."""

    share: float
    """Share of the tokens before them that tokens read (SparsePrompt); 1: all."""
    tail: int = TAIL
    """Tokens at the end of the prompt that read everything."""


@dataclass(frozen=True)
class PromptRow:
    """One reading over all cases of a length."""

    context: int
    share: float
    tail: int
    perplexity: float
    """Of the text behind prompts."""
    increase: float
    """Of the perplexity over the first reading's."""
    recalled: int
    """Right answers, of those asked."""
    asked: int
    attention: float
    """Pairs of query and key that a prompt attends over, over those of dense attention; mean."""


@dataclass(frozen=True)
class PromptStudy:
    """Which cases are read."""

    passages: int = 1
    """Of each text; the last 512 tokens of each are scored."""
    cases: int = 2
    """Of each kind of recall."""
    kinds: tuple[str, ...] = ("pass-key", "named-keys")

    def run(
        self, target: str, plan: Plan, texts: dict[str, str], context: int, shares: Sequence[float]
    ) -> list[PromptRow]:
        """Return rows of prompts of some length: read densely, at each share, and at the first without a dense end.

        target: Hugging Face id or folder. Raises ValueError for texts that are too short.
        """
        tokenizer, device = load_tokenizer(target), default_device()
        chosen = perplexity_cases(texts, tokenizer, context, context - 512, self.passages)
        chosen += recall_cases(list(self.kinds), texts, tokenizer, context, self.cases)
        readings = [PromptReading(share) for share in (1.0, *shares)] + [PromptReading(shares[0], 0)]
        runner = load_runner(target, resolve_dtype("auto", device, target), device, context + PAGE_SIZE)
        return measure_prompts(runner, plan, chosen, readings)


def measure_prompts(
    target: ModelRunner, plan: Plan, cases: Sequence[Case], readings: Sequence[PromptReading]
) -> list[PromptRow]:
    """Return a row for each reading of these cases, all of one length; the first reading is compared with.

    The prompt of a case ends where its answer begins, or where verification would begin in plain text.
    """
    rows: list[PromptRow] = []
    for reading in readings:
        losses, recalled = [], 0
        for case in cases:
            loss, right = _read_case(target, plan, case, reading)
            recalled += right and case.asked is not None
            losses += [loss] if case.asked is None else []
        perplexity = math.exp(sum(losses) / len(losses)) if losses else math.nan
        lengths = [_prompt_tokens(case) for case in cases]
        rows.append(
            PromptRow(
                context=len(cases[0].tokens),
                share=reading.share,
                tail=reading.tail,
                perplexity=perplexity,
                increase=perplexity / (rows[0].perplexity if rows else perplexity) - 1,
                recalled=recalled,
                asked=sum(case.asked is not None for case in cases),
                attention=sum(attention_read(length, reading) for length in lengths) / len(lengths),
            )
        )
    return rows


def _prompt_tokens(case: Case) -> int:
    return case.start if case.asked is None else case.asked[0]


def _read_case(target: ModelRunner, plan: Plan, case: Case, reading: PromptReading) -> tuple[float, bool]:
    """Return the mean loss of what is scored, in nats a token, and whether all of it was likeliest."""
    kv, last = SequenceKV(), _prompt_tokens(case) - 1
    try:
        sparse = sparse_tokens(last + 1, reading.tail) if reading.share < 1 else 0
        for stop, prompt in ((sparse, SparsePrompt(reading.share, plan.dense_layers)), (last, None)):
            while kv.length < min(stop, last):
                part = case.tokens[kv.length : min(kv.length + PREFILL_CHUNK, stop, last)]
                target.forward([SequenceInput(kv, part, prompt=prompt)])
        (output,) = target.forward([SequenceInput(kv, case.tokens[last:], "all")])
    finally:
        target.kv.release(kv)
    assert output.logits is not None
    inside, wanted = asked_of(case, last, len(case.tokens) - last - 1)
    logits, wanted = output.logits[inside], wanted.to(output.logits.device)
    loss = -logits.log_softmax(-1).gather(1, wanted[:, None]).mean()
    return float(loss), bool((logits.argmax(-1) == wanted).all())


def attention_read(prompt_tokens: int, reading: PromptReading, chunk: int = PREFILL_CHUNK) -> float:
    """Return the pairs of queries and keys that a prompt attends over in such chunks, of those of dense attention."""
    sparse = sparse_tokens(prompt_tokens, reading.tail) if reading.share < 1 else 0
    pairs = 0
    for start in range(0, sparse, chunk):
        stop = min(start + chunk, sparse)
        chosen = blocks_read(reading.share, stop) * BLOCK
        reads_all = chosen >= start // UNIT * UNIT
        pairs += sum(at + 1 if reads_all else chosen + at % UNIT + 1 for at in range(start, stop))
    every = prompt_tokens * (prompt_tokens + 1) // 2
    return (pairs + every - sparse * (sparse + 1) // 2) / every


COLUMNS = ("tokens", "share", "dense tail", "perplexity", "increase", "recall", "attention")


def cells(row: PromptRow) -> list[str]:
    return [
        str(row.context),
        f"{row.share:g}",
        str(row.tail) if row.share < 1 else "",
        f"{row.perplexity:.3f}",
        f"{row.increase:+.2%}",
        f"{row.recalled}/{row.asked}",
        f"{row.attention:.1%}",
    ]


def to_text(rows: list[PromptRow]) -> str:
    return align([list(COLUMNS), *map(cells, rows)], left=0)


def to_markdown(rows: list[PromptRow]) -> str:
    return markdown_table([list(COLUMNS), *map(cells, rows)], left=0)


def to_json(rows: list[PromptRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1)
