"""How many of the tokens that a target drafts for itself it accepts, as it continues passages.

Its drafting passes read the blocks that dense passes weighed most (`pillar`: PillarAttn of SparseSpec, as
served), or the first and the newest tokens (`streaming`: MagicDec, arXiv 2408.11049, with the KV of StreamingLLM).
"""

import argparse
import itertools
from dataclasses import dataclass, replace

from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.loading.model import default_device, resolve_dtype
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import ReadMemory, SequenceInput, SparseRead
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.cases import perplexity_cases
from specahead.lab.evaluation.models import load_runner
from specahead.lab.evaluation.rounds import prefill
from specahead.lab.results import Columns
from specahead.sparsity.plan import Plan
from target_service.self_drafting import SelfDrafting

TEMPERATURES = (0.0, 0.7, 1.0)
WAYS = ("pillar", "streaming")
READ_SHARES = (0.25, 0.1, 0.06)  # of the KV, that drafting passes may read


@dataclass(frozen=True)
class SelfRow:
    """One way of drafting over all passages."""

    way: str
    """One of WAYS."""
    context: int
    share: float
    """Share of the KV that drafting passes may read."""
    temperature: float
    gamma: int
    rounds: int
    judged: int
    """Drafted tokens up to the first rejected one of each round."""
    accepted: int
    read: float
    """Share of the blocks that drafting passes read."""

    @property
    def acceptance(self) -> float:
        """The share of judged tokens that were accepted."""
        return self.accepted / self.judged

    def add(self, other: "SelfRow") -> "SelfRow":
        """Return the row of both."""
        rounds = self.rounds + other.rounds
        read = (self.read * self.rounds + other.read * other.rounds) / max(1, rounds)
        counts = self.judged + other.judged, self.accepted + other.accepted
        return replace(self, rounds=rounds, judged=counts[0], accepted=counts[1], read=read)


def run_study(flags: argparse.Namespace, plan: Plan, texts: dict[str, str]) -> list[SelfRow]:
    """Return a row for each way, share and temperature, by the flags of `evaluate self`. Raises ValueError for texts
    that are too short.
    """
    device, context, gamma = default_device(), flags.context, flags.gamma
    cases = perplexity_cases(texts, load_tokenizer(flags.target), context, context, flags.passages)
    room, in_eight_bits = 2 * (context + flags.generated + 2 * (gamma + 1)), flags.draft_quantization == "fp8"
    dtype = resolve_dtype("auto", device, flags.target)
    runner = load_runner(flags.target, dtype, device, room + PAGE_SIZE, in_eight_bits)
    if plan.group_size:
        runner.kv.keep_group_means(plan.group_size, variance_limit=plan.variance_limit)
    rows: list[SelfRow] = []
    for share in READ_SHARES:
        drafting = SelfDrafting(replace(plan, budget=share, least_tokens=0), gamma)
        for way, temperature in itertools.product(WAYS, TEMPERATURES):
            row = SelfRow(way, context, share, temperature, gamma, 0, 0, 0, 0.0)
            for seed, case in enumerate(cases):
                row = row.add(
                    _go_on(runner, drafting, case.tokens, flags.generated, Sampling(temperature, seed=seed), row)
                )
            rows.append(row)
    return rows


def _go_on(
    runner: ModelRunner, drafting: SelfDrafting, passage: list[int], count: int, sampling: Sampling, row: SelfRow
) -> SelfRow:
    """Generate `count` tokens behind a passage, and return what was accepted. A passage is read once."""
    kv, tokens, memory, weighed = SequenceKV(), list(passage), drafting.new_memory(), 0
    rounds = judged = accepted = blocks_read = blocks = 0
    runner.kv.reuse_prefix(kv, tokens[:-1])
    prefill(runner, kv, tokens[kv.length : -1])
    runner.kv.index_prefix(kv, tokens)
    while len(tokens) < len(passage) + count:
        base = len(tokens)
        drafted = drafting.gamma if drafting.can_draft(weighed, base) else 0
        round_ = Drafted([0] * drafted, [], sampling, base)
        read = _read(row.way, drafting, memory, base, drafted)
        item = SequenceInput(kv, [tokens[-1], *round_.tokens], "all", read, round_)
        (output,) = runner.forward([item])
        assert output.verdict is not None
        kept, following = output.verdict
        tokens += [*round_.tokens[:kept], following]
        runner.kv.truncate(kv, len(tokens) - 1)
        weighed = base
        if drafted:
            rounds, judged, accepted = rounds + 1, judged + min(kept + 1, drafted), accepted + kept
            blocks_read += output.blocks_read or 0
            blocks += drafting.plan.num_blocks(base + drafted) * len(memory.importance)
    runner.kv.release(kv)
    return replace(row, rounds=rounds, judged=judged, accepted=accepted, read=blocks_read / max(1, blocks))


def _read(way: str, drafting: SelfDrafting, memory: ReadMemory, base: int, drafted: int) -> SparseRead:
    """Return what the passes read that draft so many tokens behind `base` committed ones."""
    read = drafting.read(memory, base, drafted)
    if way == "pillar":
        return read
    assert read.budget is not None
    blocks, first = drafting.plan.num_blocks(base), read.budget.first
    newest = max(1, round(drafting.plan.budget * blocks) - first - 1)  # one is of what is drafted
    return replace(read, budget=replace(read.budget, last=max(first, blocks - newest), room=0), group_means=False)


COLUMNS: Columns[SelfRow] = {
    "reads": lambda row: row.way,
    "tokens": lambda row: str(row.context),
    "share": lambda row: f"{row.share:g}",
    "temperature": lambda row: f"{row.temperature:g}",
    "blocks read": lambda row: f"{row.read:.1%}",
    "acceptance a token": lambda row: f"{row.acceptance:.3f}",
    "accepted a round": lambda row: f"{row.accepted / row.rounds:.2f}",
    "of": lambda row: str(row.gamma),
}
