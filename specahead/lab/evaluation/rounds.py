"""One case through the engine's verify path, for many variants.

A variant is a method with a plan. The draft reads a case once and leaves its evidence. The target reads the dense part
once, and every variant continues from a fork of its KV, in rounds of γ + 1 tokens, reading by its own reader. All
tokens are the text's own, so that every variant sees the same rounds, and rounds whose reads do not depend on what
earlier ones read may run in one pass: all but those of `ahead`. Variants of `ahead` remember, so they run side by side,
round by round. What is counted stays on the device until a variant's last round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.divergence import divergence
from specahead.engine.steps.inputs import SequenceInput, SparseRead
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.attending import forward_attending, forward_weighing
from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.choice import Rounds
from specahead.lab.evaluation.forks import fork
from specahead.lab.evaluation.methods import Rival, rival_of
from specahead.lab.evaluation.readers import BlocksRead, LayerReader, all_blocks
from specahead.lab.evaluation.workers import note_rounds
from specahead.sparsity.announce import announce_rounds
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader

PREFILL_CHUNK = 512
SIDE_BY_SIDE = 16  # variants of `ahead` that run in one pass
# Rounds of other methods that run in one pass on a GPU, which waits for launches; on a CPU one by one takes the least
# memory.
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
    tokens: Tensor
    """The case's tokens from the start on, int64, on the device."""
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
            for chosen in _side_by_side(variants, alike):
                run(drafted, chosen)
    finally:
        target.kv.release(prompt)
    return [results[i] for i in range(len(variants))]


def _side_by_side(variants: list[Variant], numbers: list[int]) -> Iterator[list[int]]:
    """Yield the numbers of variants that run together: dense ones, those of `ahead` by their group size, and rivals."""
    ahead = [i for i in numbers if variants[i].method == "ahead"]
    yield from ([i] for i in numbers if variants[i].method == "dense")
    for group_size in sorted({variants[i].plan.group_size for i in ahead}):
        chosen = [i for i in ahead if variants[i].plan.group_size == group_size]
        yield from (chosen[start : start + SIDE_BY_SIDE] for start in range(0, len(chosen), SIDE_BY_SIDE))
    yield from ([i] for i in numbers if rival_of(variants[i].method) is not None)


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
    text = torch.tensor(case.tokens[case.start :], device=draft.device)
    return DraftedCase(case, rounds, evidence, torch.cat(logits).log_softmax(-1), text)


def asked_of(case: Case, first: int, rows: int) -> slice:
    """Return which of the `rows` queries from token `first` on are scored."""
    begin, end = (position - 1 - first for position in case.asked or (case.start + 1, len(case.tokens)))
    return slice(min(rows, max(0, begin)), min(rows, max(0, end)))


class _Run:
    """One variant as it goes through a case, and what it counts on the device."""

    def __init__(self, target: ModelRunner, prompt: SequenceKV, variant: Variant, drafted: DraftedCase) -> None:
        self.target, self.variant, self.drafted = target, variant, drafted
        self.kv = fork(target.kv, prompt)
        self._sums = VariantSums()
        self._counted: list[Tensor] = []
        self._read: list[BlocksRead] = []

    def input_of(self, first: int, last: int, read: SparseRead | None = None) -> SequenceInput:
        """Return the input of the tokens from `first` up to `last`."""
        return SequenceInput(self.kv, self.drafted.case.tokens[first:last], "all", read)

    def count(self, first: int, logits: Tensor, read: BlocksRead) -> None:
        """Count the tokens of a pass, from `first` on, and what was read. logits: [rows, vocab]. Launches only."""
        drafted, sums, last = self.drafted, self._sums, first + len(logits)
        log_probs, draft_log_probs = logits.log_softmax(-1), drafted.rows_of(drafted.log_probs, first, last)
        following = drafted.rows_of(drafted.tokens, first + 1, last + 1)
        rows = len(following)
        accepted = torch.minimum(log_probs[:rows], draft_log_probs[:rows]).exp().sum()
        inside = asked_of(drafted.case, first, rows)
        wanted = following[inside]
        nats = log_probs[inside].gather(1, wanted[:, None])
        wrong = (logits[inside].argmax(-1) != wanted).sum()
        varied = squares = torch.zeros_like(accepted)
        if drafted.dense is not None and self.variant.method != "dense":
            dense = drafted.rows_of(drafted.dense, first, last)
            varied = divergence(logits[:rows], dense[:rows])[:, 0].sum()
            squares = (nats - dense[inside].log_softmax(-1).gather(1, wanted[:, None])).square().sum()
        self._counted.append(torch.stack([each.double() for each in (accepted, nats.sum(), wrong, varied, squares)]))
        self._read.append(read)
        sums.judged += rows
        sums.scored += len(wanted)

    def end(self) -> VariantSums:
        """Return the sums, once the device has counted everything."""
        sums, mistakes = self._sums, 0.0
        for accepted, nats, wrong, varied, squares in torch.stack(self._counted).tolist():
            sums.accepted += accepted
            sums.nll -= nats
            mistakes += wrong
            sums.varied += varied
            sums.squares += squares
        sums.asked = int(self.drafted.case.asked is not None)
        sums.recalled = int(sums.asked and not mistakes)
        count_blocks(sums, self._read, self.variant.plan.block_size)
        return sums


def count_blocks(sums: VariantSums, reads: list[BlocksRead], block_size: int) -> None:
    """Count the blocks that all rounds of a variant read."""
    most = reads[-1].chosen.shape[-1]
    chosen = torch.cat([pad(each.chosen, (0, most - each.chosen.shape[-1])) for each in reads])
    heads, chosen = chosen.shape[1] * chosen.shape[2], chosen.flatten(1)
    present = [heads * blocks for each in reads for blocks in each.blocks]
    counts = chosen.sum(1).tolist()
    for count, there, summaries in zip(
        counts, present, chain.from_iterable(each.summaries for each in reads), strict=True
    ):
        sums.read += count * block_size + summaries
        sums.present += there * block_size
    sums.blocks, sums.rounds, sums.compared = sum(counts), len(counts), sum(counts[1:])
    for i, hot in enumerate(hot_blocks(chosen)):
        sums.fresh[i] = int((chosen[1:] & ~hot).sum())
        sums.hot[i] = sum((hot.sum(1).float() / torch.tensor(present[1:], device=hot.device)).tolist())


def hot_blocks(chosen: Tensor) -> Iterator[Tensor]:
    """For each number of last rounds in HOT_ROUNDS, yield which blocks these read: [rounds - 1, blocks] bool, for the
    rounds after the first. chosen: [rounds, blocks] bool, what each round reads.
    """
    number = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device)[:, None]
    never = torch.iinfo(torch.int32).min // 2
    last_read = number.where(chosen, never).cummax(0).values[:-1]  # before each round but the first
    for window in HOT_ROUNDS:
        yield last_read >= number[1:] - window


def _run_dense(run: _Run) -> None:
    """Run the rounds of the dense variant, and keep its logits to compare others with."""
    drafted, plan = run.drafted, run.variant.plan
    for rounds in drafted.rounds:
        (output,) = run.target.forward([run.input_of(rounds.first, rounds.last)])
        assert output.logits is not None
        if drafted.dense is None:
            drafted.dense = output.logits.new_empty(drafted.log_probs.shape)
        drafted.rows_of(drafted.dense, rounds.first, rounds.last).copy_(output.logits)
        blocks = [plan.num_blocks(length) for length in rounds.lengths]
        everything = all_blocks(plan, rounds, output.logits.device)
        run.count(rounds.first, output.logits, BlocksRead(everything, blocks, [0.0] * rounds.count))
        note_rounds(rounds.count)


def _run_rival(run: _Run, rival: Rival) -> None:
    """Run the rounds of a variant whose layers choose."""
    reader = LayerReader(rival, run.variant.plan)
    for rounds, evidence in zip(run.drafted.rounds, run.drafted.evidence, strict=True):
        reader.read(rounds, evidence)
        item = run.input_of(rounds.first, rounds.last)
        logits = forward_attending(run.target, item.kv, item.tokens, reader.attend(run.target, item))
        run.count(rounds.first, logits, reader.finish())
        note_rounds(rounds.count)


def _run_ahead(target: ModelRunner, runs: list[_Run]) -> None:
    """Run variants of `ahead` side by side, round by round. Their announcements depend on no round of the target."""
    drafted = runs[0].drafted
    evidence = [each for of_pass in drafted.evidence for each in of_pass]
    ends = [*chain.from_iterable(rounds.lengths for rounds in drafted.rounds)]
    starts = [drafted.case.start, *ends[:-1]]
    readers = [Reader(run.variant.plan, report_blocks=True) for run in runs]
    bases = [first + 1 for first in starts]
    announced = [announce_rounds(evidence, run.variant.plan, bases) for run in runs]
    for first, last, *of_round in zip(starts, ends, *announced, strict=True):
        reads = [reader.read(each, first + 1, last) for reader, each in zip(readers, of_round, strict=True)]
        outputs = target.forward([run.input_of(first, last, read) for run, read in zip(runs, reads, strict=True)])
        for run, reader, output in zip(runs, readers, outputs, strict=True):
            reader.finish(output)
            assert output.logits is not None and reader.chosen is not None
            chosen, plan = reader.chosen[None].to(target.device), run.variant.plan
            heads = len(plan.sparse_layers) * plan.target_kv_heads if reader.is_sparse else 0
            run.count(first, output.logits, BlocksRead(chosen, [chosen.shape[-1]], [reader.summary_tokens * heads]))
        note_rounds(len(runs))


def _run_variants(
    target: ModelRunner, prompt: SequenceKV, drafted: DraftedCase, variants: list[Variant]
) -> list[VariantSums]:
    """Run the dense variant, one rival, or variants of `ahead` of one group size and limit of variances."""
    plan, rival = variants[0].plan, rival_of(variants[0].method)
    if variants[0].method == "ahead" and plan.group_size:
        slots = len(variants) * (len(drafted.case.tokens) // plan.group_size)
        target.kv.keep_group_means(plan.group_size, slots, plan.variance_limit)
    runs = [_Run(target, prompt, variant, drafted) for variant in variants]
    try:
        if rival is not None:
            _run_rival(runs[0], rival)
        elif variants[0].method == "dense":
            _run_dense(runs[0])
        else:
            _run_ahead(target, runs)
    finally:
        for run in runs:
            target.kv.release(run.kv)
    return [run.end() for run in runs]
