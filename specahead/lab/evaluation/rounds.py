"""One case through the engine's verify path, for many variants.

A variant is a method with a plan. The draft reads a case once and leaves its evidence. The target reads the dense part
once, and every variant continues from a fork of its KV, in rounds of γ + 1 tokens, reading by its own reader. All
tokens are the text's own, so that every variant sees the same rounds, and rounds whose reads do not depend on what
earlier ones read may run in one pass: those of a rival and of the draft. Variants of `ahead` remember, so they run side
by side, round by round.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.divergence import divergence
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.attending import forward_attending, forward_weighing
from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.choice import Rounds
from specahead.lab.evaluation.forks import fork
from specahead.lab.evaluation.methods import rival_of
from specahead.lab.evaluation.readers import BlocksRead, LayerReader, make_reader
from specahead.lab.evaluation.workers import note_rounds
from specahead.sparsity.announce import announce
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection

PREFILL_CHUNK = 512
SIDE_BY_SIDE = 16  # variants of `ahead` that run in one pass
# Rounds of a rival that run in one pass on a GPU, which waits for launches; on a CPU one by one takes the least memory.
ROUNDS_AT_ONCE = 32
HOT_ROUNDS = (1, 2, 4, 8, 16, 32)  # numbers of last rounds whose blocks a hot buffer holds


@dataclass(frozen=True)
class Variant:
    """A method with a plan."""

    method: str
    budget: str
    """The row's label: a share of the KV."""
    plan: Plan
    gamma: int = 3
    """Drafted tokens a round."""
    label: str = ""
    """Stands in place of the method's name."""

    @property
    def name(self) -> str:
        return self.label or self.method


@dataclass
class VariantSums:
    """A variant's sums over rounds and cases; ratios are taken at the end."""

    nll: float = 0.0
    """Negative log likelihood of scored tokens, in nats."""
    scored: int = 0
    judged: int = 0
    """Positions whose distribution was compared with the draft's."""
    accepted: float = 0.0
    """Expected acceptances: Σ_v min(p, q) at each position."""
    varied: float = 0.0
    """Total variation from the dense distributions at these positions; 0 where the first variant is not dense."""
    squares: float = 0.0
    """Σ of the squared difference from the dense variant's nats, over scored tokens; 0 where `varied` is."""
    recalled: int = 0
    """Right answers, of those asked."""
    asked: int = 0
    read: float = 0.0
    """Tokens of KV that were read, over layers and heads."""
    present: float = 0.0
    """Tokens of KV that there were."""
    blocks: int = 0
    """Blocks that were read."""
    rounds: int = 0
    compared: int = 0
    """Blocks of rounds after the first."""
    fresh: list[int] = field(default_factory=lambda: [0] * len(HOT_ROUNDS))
    """Of these, blocks that the last rounds did not read, for each of HOT_ROUNDS."""
    hot: list[float] = field(default_factory=lambda: [0.0] * len(HOT_ROUNDS))
    """Sum over rounds of the share of all blocks that is hot."""

    def add(self, other: "VariantSums") -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            both = [a + b for a, b in zip(mine, value, strict=True)] if isinstance(value, list) else mine + value
            setattr(self, name, both)


@dataclass
class DraftedCase:
    """A case, and the draft's view of it."""

    case: Case
    rounds: list[Rounds]
    """Those that may run in one pass together."""
    evidence: list[Tensor]
    """Of each of these, the draft's weights on blocks, the mean over a round's queries: [rounds, layers, heads,
    blocks]."""
    log_probs: Tensor
    """[tokens from start on, vocab]."""
    dense: Tensor | None = None
    """The logits of the dense variant, once it has run: [tokens from start on, vocab]."""

    def rows_of(self, rows: Tensor, first: int, last: int) -> Tensor:
        """Return the rows of tokens first … last - 1 among those of all tokens from the start on."""
        return rows[first - self.case.start : last - self.case.start]


def rounds_of(case: Case, gamma: int, at_once: int = 1) -> list[Rounds]:
    """Return the rounds of a case, `at_once` or fewer together. The last round may have fewer tokens."""
    rows, tokens = gamma + 1, len(case.tokens) - case.start
    whole, left = divmod(tokens, rows)
    rounds = [Rounds(case.start + rows * i, rows, min(at_once, whole - i)) for i in range(0, whole, at_once)]
    return rounds + ([Rounds(len(case.tokens) - left, left, 1)] if left else [])


def evaluate_case(
    draft: ModelRunner,
    target: ModelRunner,
    case: Case,
    variants: list[Variant],
    on_variant: Callable[[int, VariantSums], object] = lambda index, sums: None,
    at_once: int = 0,
) -> list[VariantSums]:
    """Return the sums of each variant on one case. Variants may differ in everything but their models.

    on_variant: called with a variant's index and sums as soon as it has been evaluated, the dense one first. at_once:
    rounds of a pass, at most; 0: by the device.
    """
    at_once = at_once or (ROUNDS_AT_ONCE if target.device.type == "cuda" else 1)
    results: dict[int, VariantSums] = {}
    prompt = SequenceKV()

    def run(drafted: DraftedCase, chosen: list[int]) -> None:
        done = _run_variants(target, prompt, drafted, [variants[i] for i in chosen])
        for i, sums in zip(chosen, done, strict=True):
            results[i] = sums
            on_variant(i, sums)

    try:
        prefill(target, prompt, case.tokens[: case.start])
        for shape in sorted({(v.gamma, v.plan.block_size) for v in variants}):
            drafted = run_draft(draft, case, *shape, at_once)
            alike = [i for i, v in enumerate(variants) if (v.gamma, v.plan.block_size) == shape]
            ours = [i for i in alike if rival_of(variants[i].method) is None]
            for group_size in sorted({variants[i].plan.group_size for i in ours}):
                chosen = [i for i in ours if variants[i].plan.group_size == group_size]
                for start in range(0, len(chosen), SIDE_BY_SIDE):
                    run(drafted, chosen[start : start + SIDE_BY_SIDE])
            for i in sorted(set(alike) - set(ours)):
                run(drafted, [i])
    finally:
        target.kv.release(prompt)
    return [results[i] for i in range(len(variants))]


def prefill(runner: ModelRunner, sequence: SequenceKV, tokens: list[int]) -> None:
    """Read tokens densely, some at a time."""
    for at in range(0, len(tokens), PREFILL_CHUNK):
        runner.forward([SequenceInput(sequence, tokens[at : at + PREFILL_CHUNK])])


def run_draft(draft: ModelRunner, case: Case, gamma: int, block_size: int, at_once: int = 1) -> DraftedCase:
    """Have the draft read a case in rounds of gamma + 1 tokens, some in each pass; return its view."""
    sequence, evidence, logits = SequenceKV(), [], []
    rounds = rounds_of(case, gamma, at_once)
    try:
        prefill(draft, sequence, case.tokens[: case.start])
        for part in rounds:
            tokens = case.tokens[part.first : part.last]
            given, weights = forward_weighing(draft, sequence, tokens, block_size, len(tokens))
            evidence.append(weights.unflatten(1, (part.count, -1)).mean(2).transpose(0, 1))
            logits.append(given)
    finally:
        draft.kv.release(sequence)
    return DraftedCase(case, rounds, evidence, torch.cat(logits).log_softmax(-1))


def asked_of(case: Case, first: int, rows: int) -> tuple[list[int], Tensor]:
    """Return which of the `rows` queries from token `first` on are scored, and the right next token of each."""
    asked = case.asked or (case.start + 1, len(case.tokens))
    inside = [i for i in range(rows) if asked[0] <= first + 1 + i < asked[1]]
    return inside, torch.tensor([case.tokens[first + 1 + i] for i in inside], dtype=torch.int64)


class _Run:
    """One variant as it goes through a case."""

    def __init__(self, target: ModelRunner, prompt: SequenceKV, variant: Variant, drafted: DraftedCase) -> None:
        self.target, self.variant, self.drafted = target, variant, drafted
        self.reader = make_reader(variant.method, variant.plan)
        self.kv = fork(target.kv, prompt)
        self.sums = VariantSums()
        self.right = True
        self.last_announced: BlockSelection | None = None
        self.last_read: Tensor | None = None  # round in which each block was read last, int32

    def prepare(self, first: int, last: int, evidence: Tensor) -> SequenceInput:
        """Return the input of the round from token `first` on, up to `last`, of a method that the engine reads by.

        evidence: [draft_layers, draft_heads, blocks], of which `ahead` makes the announcement.
        """
        assert isinstance(self.reader, Reader)
        if self.variant.method == "ahead":
            self.last_announced = announce(evidence, self.variant.plan, first + 1, self.last_announced)
        read = self.reader.read(self.last_announced, first + 1, last)
        return SequenceInput(self.kv, self.drafted.case.tokens[first:last], "all", read)

    def finish(self, first: int, output: SequenceOutput) -> None:
        """Count what the round from token `first` on gave."""
        assert isinstance(self.reader, Reader) and output.logits is not None
        self.reader.finish(output)
        assert self.reader.chosen is not None
        self.count(first, output.logits)
        self.count_blocks(BlocksRead(self.reader.chosen, *self.reader.tokens_read))

    def run_rounds(self, rounds: Rounds, evidence: Tensor) -> None:
        """Run rounds in one pass whose layers choose, and count them. evidence: as DraftedCase has it."""
        assert isinstance(self.reader, LayerReader)
        self.reader.read(rounds, evidence)
        item = SequenceInput(self.kv, self.drafted.case.tokens[rounds.first : rounds.last], "all")
        logits = forward_attending(self.target, item.kv, item.tokens, self.reader.attend(self.target, item))
        self.count(rounds.first, logits)
        for read in self.reader.finish():
            self.count_blocks(read)

    def count(self, first: int, logits: Tensor) -> None:
        """Count the tokens from `first` on. logits: [rows, vocab]."""
        case, sums, last = self.drafted.case, self.sums, first + len(logits)
        log_probs, draft_log_probs = logits.log_softmax(-1), self.drafted.rows_of(self.drafted.log_probs, first, last)
        rows = len(case.tokens[first + 1 : last + 1])
        sums.accepted += float(torch.minimum(log_probs[:rows], draft_log_probs[:rows]).exp().sum())
        sums.judged += rows
        inside, wanted = asked_of(case, first, rows)
        wanted = wanted.to(logits.device)
        nats = log_probs[inside].gather(1, wanted[:, None])
        sums.nll -= float(nats.sum())
        sums.scored += len(inside)
        self.right &= bool((logits[inside].argmax(-1) == wanted).all())
        if self.drafted.dense is not None and self.variant.method != "dense":
            dense = self.drafted.rows_of(self.drafted.dense, first, last)
            sums.varied += float(divergence(logits[:rows], dense[:rows])[:, 0].sum())
            dense_nats = dense[inside].log_softmax(-1).gather(1, wanted[:, None])
            sums.squares += float((nats - dense_nats).square().sum())

    def count_blocks(self, read: BlocksRead) -> None:
        """Count the blocks that the next round read."""
        chosen, sums = read.chosen, self.sums
        round_ = sums.rounds
        sums.read, sums.present = sums.read + read.tokens, sums.present + read.present
        sums.blocks, sums.rounds = sums.blocks + int(chosen.sum()), sums.rounds + 1
        never = torch.iinfo(torch.int32).min // 2
        known = torch.full(chosen.shape, never, dtype=torch.int32)
        if self.last_read is not None:
            known[..., : self.last_read.shape[-1]] = self.last_read
            sums.compared += int(chosen.sum())
            for i, window in enumerate(HOT_ROUNDS):
                hot = known >= round_ - window
                sums.fresh[i] += int((chosen & ~hot).sum())
                sums.hot[i] += float(hot.float().mean())
        known[chosen] = round_
        self.last_read = known


def _run_side_by_side(target: ModelRunner, runs: list[_Run], drafted: DraftedCase) -> None:
    """Run variants that the engine reads by, round by round."""
    for part, of_part in zip(drafted.rounds, drafted.evidence, strict=True):
        for first, last, evidence in zip(range(part.first, part.last, part.rows), part.lengths, of_part, strict=True):
            outputs = target.forward([run.prepare(first, last, evidence) for run in runs])
            logits = outputs[0].logits
            if runs[0].variant.method == "dense" and logits is not None:
                if drafted.dense is None:
                    drafted.dense = logits.new_empty(drafted.log_probs.shape)
                drafted.rows_of(drafted.dense, first, last).copy_(logits)
            for run, output in zip(runs, outputs, strict=True):
                run.finish(first, output)
            note_rounds(len(runs))


def _run_variants(
    target: ModelRunner, prompt: SequenceKV, drafted: DraftedCase, variants: list[Variant]
) -> list[VariantSums]:
    """Run one rival, or variants that the engine reads by, of one group size and limit of variances."""
    plan, case = variants[0].plan, drafted.case
    is_ours = rival_of(variants[0].method) is None
    if is_ours and plan.group_size:
        slots = len(variants) * (len(case.tokens) // plan.group_size)
        target.kv.keep_group_means(plan.group_size, slots, plan.variance_limit)
    runs = [_Run(target, prompt, variant, drafted) for variant in variants]
    try:
        if is_ours:
            _run_side_by_side(target, runs, drafted)
        else:
            for rounds, evidence in zip(drafted.rounds, drafted.evidence, strict=True):
                runs[0].run_rounds(rounds, evidence)
                note_rounds(rounds.count)
    finally:
        for run in runs:
            target.kv.release(run.kv)
    for run in runs:
        run.sums.asked = int(case.asked is not None)
        run.sums.recalled = int(case.asked is not None and run.right)
    return [run.sums for run in runs]
